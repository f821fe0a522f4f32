"""tools/generate.py against transformers' greedy generation, in one process and in several layouts."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.helpers import distributed, small_model
from tests.helpers.finetune import finetune
from tests.helpers.rows import tokenizer
from tests.helpers.tools import call

TOPK = small_model.SHAPE["index_topk"]
NEW = 9
LENGTHS = (1, 3, TOPK, 2 * TOPK + 5, 40)  # shorter and longer than what a row may select


def generate(*words: str) -> list[dict]:
    code, out, err = call("generate", *words)
    assert code == 0, err
    return [json.loads(line) for line in out.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return small_model.make(tmp_path_factory.mktemp("model") / "hf")


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, 256, (length,), generator=generator).tolist() for length in LENGTHS]


def write(path: Path, rows: Sequence[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def expected(folder: Path, ids: list[int], new: int = NEW) -> list[int]:
    """The new tokens of transformers."""
    model = small_model.in_transformers(folder)
    return model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=new)[0, len(ids) :].tolist()


def test_tokens_are_those_of_transformers(folder, tmp_path):
    file = write(tmp_path / "p.jsonl", [{"input_ids": ids} for ids in prompts()])
    found = generate("--load-hf", str(folder), "--prompt-file", file, "--max-new-tokens", str(NEW))
    assert [line["tokens"] for line in found] == [expected(folder, ids) for ids in prompts()]
    assert all(len(line["log_probs"]) == len(line["tokens"]) for line in found)
    logits = small_model.in_transformers(folder)(torch.tensor([prompts()[3]])).logits[0, -1]
    assert found[3]["log_probs"][0] == pytest.approx(logits.log_softmax(-1).max().item(), abs=1e-5)


LAYOUTS = {
    "tp2": "--tensor-model-parallel-size 2 --sequence-parallel",
    "cp2": "--context-parallel-size 2",
    "pp2": "--pipeline-model-parallel-size 2",
    "ep2": "--expert-model-parallel-size 2",
    "dp2": "",
}
LAYOUTS_OF_4 = {
    "tp2 pp2 ep2": "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
    "--expert-model-parallel-size 2",
    "cp2 ep4": "--context-parallel-size 2 --expert-model-parallel-size 4 --moe-token-dispatcher-type allgather",
}


def in_layouts(folder: Path, file: str, layouts: dict[str, str]) -> dict[str, str]:
    """What the first rank prints in each layout; the others print nothing."""
    os.environ |= {"WORLD_SIZE": str(dist.get_world_size()), "RANK": str(dist.get_rank())}
    words = ("--load-hf", str(folder), "--prompt-file", file, "--max-new-tokens", str(NEW))
    found = {}
    for name, flags in layouts.items():
        code, out, err = call("generate", *words, *flags.split())
        assert code == 0, err
        found[name] = out
    return found


@pytest.mark.parametrize(("ranks", "layouts"), [(2, LAYOUTS), (4, LAYOUTS_OF_4)], ids=["2", "4"])
def test_every_layout_generates_the_same(folder, tmp_path, ranks, layouts):
    file = write(tmp_path / "p.jsonl", [{"input_ids": ids} for ids in prompts()])
    first, *others = distributed.run(ranks, in_layouts, folder, file, layouts, timeout=240)
    wanted = [expected(folder, ids) for ids in prompts()]
    assert {name: [json.loads(line)["tokens"] for line in out.splitlines()] for name, out in first.items()} == {
        name: wanted for name in layouts
    }
    assert not any(out for other in others for out in other.values())


def test_text_prompts_and_chats(folder, tmp_path):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    theirs.chat_template = (folder / "chat_template.jinja").read_text()
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    history = [*chat, {"role": "assistant", "content": "Because."}, {"role": "user", "content": "And then?"}]
    rows = [{"prompt": "Once upon"}, {"messages": chat, "id": 7}, {"messages": history}, {"prompt": chat}]
    rows.append({"messages": chat, "chat_template_kwargs": {"enable_thinking": False}})
    function = {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}}
    called = {"role": "assistant", "content": "", "reasoning_content": "A clock is needed.", "tool_calls": []}
    called["tool_calls"].append({"type": "function", "function": {"name": "now", "arguments": {}}})
    rows.append(
        {
            "messages": [*chat, called, {"role": "tool", "content": "12:00"}],
            "tools": [{"type": "function", "function": function}],
        }
    )
    ids = [theirs("Once upon", add_special_tokens=False)["input_ids"]]
    for row in rows[1:]:
        more = row.get("chat_template_kwargs", {}) | {"tools": row.get("tools")}
        text = theirs.apply_chat_template(
            row.get("messages", row.get("prompt")), add_generation_prompt=True, tokenize=False, **more
        )
        ids.append(theirs(text, add_special_tokens=False)["input_ids"])
    found = generate(
        "--load-hf", str(folder), "--prompt-file", write(tmp_path / "p.jsonl", rows), "--max-new-tokens", "6"
    )
    for line, prompt in zip(found, ids, strict=True):
        assert line["tokens"] == expected(folder, prompt, 6)
        said = [token for token in line["tokens"] if token not in small_model.SHAPE["eos_token_id"]]
        assert line["text"] == tokenizer().decode(said)
    assert found[1]["tokens"] == found[3]["tokens"]


def test_what_is_not_read_of_a_row_is_named(folder, tmp_path):
    rows = [{"input_ids": [5], "id": 1}, {"prompt": "a", "completion": "b"}, {"input_ids": [6]}]
    words = ("--prompt-file", write(tmp_path / "p.jsonl", rows), "--max-new-tokens", "1")
    code, out, err = call("generate", "--load-hf", str(folder), *words)
    assert code == 0 and len(out.splitlines()) == 3
    assert "kinds: 2 input_ids, 1 prompt; columns not used: completion, id" in err


def test_a_completion_ends_with_an_end_token(folder, tmp_path):
    """What the model says anyway is made an end token of: in generation_config.json, or else in config.json."""
    [wanted] = [expected(folder, prompts()[3])]
    other = small_model.make(tmp_path / "hf")
    file = write(tmp_path / "p.jsonl", [{"input_ids": ids} for ids in prompts()[3:]])
    words = ("--prompt-file", file, "--max-new-tokens", str(NEW), "--load-hf", str(other))
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": wanted[2]}))
    first, second = generate(*words)
    assert first["tokens"] == wanted[: wanted.index(wanted[2]) + 1]
    assert len(second["tokens"]) == NEW or second["tokens"][-1] == wanted[2]
    (other / "generation_config.json").unlink()
    config = json.loads((other / "config.json").read_text()) | {"eos_token_id": [wanted[4], 1]}
    (other / "config.json").write_text(json.dumps(config))
    assert generate(*words)[0]["tokens"] == wanted[: wanted.index(wanted[4]) + 1]


def test_a_sentence_that_was_learnt_is_said_again(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chat = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "Every step is written down."}]
    Path("train.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    flags = {"load_hf": str(folder), "seq_length": 64, "train_iters": 60, "lr": 3e-3, "lr_decay_style": "constant"}
    finetune(None, global_batch_size=1, save="out", moe_router_bias_update_rate=None, weight_decay=None, **flags)
    file = write(tmp_path / "p.jsonl", [{"messages": chat[:1]}])
    [line] = generate("--load", "out", "--prompt-file", file, "--max-new-tokens", "50")
    assert line["text"].endswith("Every step is written down.")
    assert line["tokens"][-1] == tokenizer().token_to_id("<|user|>")


def test_without_a_tokenizer_there_is_no_text(tmp_path):
    other = small_model.make(tmp_path / "hf")
    (other / "tokenizer.json").unlink()
    words = ("--load-hf", str(other), "--max-new-tokens", "2", "--prompt-file")
    code, out, err = call("generate", *words, write(tmp_path / "p.jsonl", [{"input_ids": [1, 2]}]))
    assert code == 0 and json.loads(out)["text"] is None
    assert "warning: tokens without text" in err
    code, out, err = call("generate", *words, write(tmp_path / "p.jsonl", [{"prompt": "a"}]))
    assert code == 2 and not out and "neither tokenizer.json nor a .model file" in err


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"prompt": "a", "input_ids": [1]}', "exactly one of messages, prompt and input_ids; the row has prompt and"),
        ('{"text": "a"}', "exactly one of messages, prompt and input_ids; the row has none, but ['text']"),
        ('{"input_ids": []}', "input_ids must be a list of integers that is not empty, got []"),
        ('{"input_ids": [1, 272]}', "token id 272 is outside the model's vocabulary of 272"),
        ('{"input_ids": [1.5]}', "input_ids must be a list of integers"),
        ('{"prompt": ""}', "prompt holds no token"),
        ('{"prompt": 3}', "prompt must be a string or a list of messages, got 3"),
        ('{"prompt": "a <|user|> b"}', "prompt contains the special token <|user|>"),
        ('{"messages": []}', "messages must be a list of messages that is not empty"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
            "a prompt ends",
        ),
        ('{"messages": [{"role": "wizard", "content": "a"}]}', "messages[0]"),
        ('{"prompt": "a", "labels": [1]}', "the row has the key labels"),
        ("{prompt}", "Expecting property name"),
        ('{"input_ids": [' + "1, " * 4090 + "1]}", "exceed max_position_embeddings (4096)"),
    ],
)
def test_a_bad_row_is_named(folder, tmp_path, row, message):
    file = tmp_path / "p.jsonl"
    file.write_text('{"input_ids": [1]}\n\n' + row + "\n")
    code, out, err = call("generate", "--load-hf", str(folder), "--prompt-file", str(file), "--max-new-tokens", "8")
    assert code == 2 and not out
    assert f"error: {file}:3: " in err and message in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--load-hf HF", "give --prompt-file FILE"),
        ("--prompt-file P", "give --load CHECKPOINT or --load-hf FOLDER"),
        ("--load-hf HF --prompt-file nowhere.jsonl", "nowhere.jsonl holds or matches no file"),
        ("--load-hf HF --prompt-file P --max-new-tokens 0", "--max-new-tokens is 0; it must be at least 1"),
        ("--load-hf HF --prompt-file P --lr 1", "unknown flag --lr"),
        (
            "--load-hf HF --prompt-file P --tensor-model-parallel-size 2 --sequence-parallel",
            "number of ranks (1)",
        ),
        ("--load nowhere --prompt-file P", "nowhere"),
    ],
)
def test_wrong_flags(folder, tmp_path, words, message):
    file = write(tmp_path / "p.jsonl", [{"input_ids": [1]}])
    names = {"HF": str(folder), "P": file}
    code, out, err = call("generate", *(names.get(word, word) for word in words.split()))
    assert code == 2 and not out and "error: " in err and message in err


def test_a_log_probability_that_is_no_number_ends_the_run(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    other = small_model.make(tmp_path / "hf")
    shard = other / "model.safetensors"
    tensors = load_file(shard)
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, shard, metadata={"format": "pt"})
    file = write(tmp_path / "p.jsonl", [{"input_ids": [1, 2]}])
    code, out, err = call("generate", "--load-hf", str(other), "--prompt-file", file)
    assert code == 1 and not out and "log-probability of new token 0 is nan" in err
