"""What users get wrong, through finetune_glm.py: one line, the exit code, and the documentation that explains it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_glm.config.source import PRESET_FOLDER
from megatron_glm.launch import one_line_errors
from megatron_glm.ops import backends
from tests.helpers.finetune import finetune, write_rows
from tests.helpers.rows import chat_folder

TROUBLESHOOTING = Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md"
LAYOUT = {"pipeline_model_parallel_size": 2, "context_parallel_size": 4}

SERVED = {"kv_lora_rank": 512, "qk_pos_emb_head_dim": 64, "dsa_indexer_head_dim": 128, "dsa_indexer_n_heads": 32}


def rows(*lines: dict | str) -> None:
    """train.jsonl, of these rows."""
    Path("train.jsonl").write_text(
        "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    )


def answer_at_end(length: int) -> dict:
    """A row of so many tokens, of which the last one has loss."""
    return {"input_ids": [1] * length, "labels": [-100] * (length - 1) + [1]}


def chat(answer: dict, question: str = "To be?") -> None:
    """train.jsonl, a chat whose answer has these keys, too; the tokenizer and the chat template in `hf`."""
    Path("hf").mkdir()
    chat_folder(Path("hf"))
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": "That"} | answer]
    rows({"messages": messages})


def trained(**flags) -> None:
    """A checkpoint of iteration 2 in `tuned`."""
    finetune(train_iters=2, save="tuned", **flags)


def without_pointer() -> None:
    trained()
    Path("tuned/latest_checkpointed_iteration.txt").unlink()


def damaged() -> None:
    trained()
    file = next(Path("tuned/iter_0000002").glob("*.distcp"))
    os.truncate(file, file.stat().st_size // 2)


def hf_config(**changes: object) -> None:
    """The preset's config.json in `hf`, with changes."""
    Path("hf").mkdir()
    content = json.loads((PRESET_FOLDER / "glm5.2-tiny.json").read_text()) | changes
    Path("hf/config.json").write_text(json.dumps(content))


def pointer() -> None:
    hf_config()
    Path("hf/tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n")


NVFP4 = {"quant_algo": "NVFP4", "quant_method": "modelopt"}
YARN = {"rope_theta": 8e6, "type": "yarn", "factor": 40}
CHATS = {"tokenizer_model": "hf", "train_iters": 1}

# name: exit code, flags besides those of tests/helpers/finetune.py, ranks, what is done before
CASES: dict[str, tuple[int, dict, int, Callable[[], None] | None]] = {
    "no flag of this name": (2, {"seq_lenght": 24}, 1, None),
    "a flag of another trainer": (2, {"learning_rate": 1e-4, "train_iters": 1}, 1, None),
    "no length of the run": (2, {}, 1, None),
    "no data there": (2, {"data_path": "data/tulu3.jsonl", "train_iters": 1}, 1, None),
    "no rows": (2, {"train_iters": 1}, 1, rows),
    "no answer in reach": (2, {"train_iters": 1}, 1, lambda: rows(answer_at_end(30), answer_at_end(40))),
    "no tokenizer": (2, {"train_iters": 1}, 1, lambda: rows({"text": "To be"})),
    "a row of no kind": (2, {"train_iters": 1}, 1, lambda: rows({"input_ids": [1, 2]}, {"question": "To be?"})),
    "a key that nothing reads": (2, CHATS, 1, lambda: chat({"train_detail": [{"train": False}]})),
    "a fraction": (2, CHATS, 1, lambda: chat({"weight": 0.5})),
    "a special token": (2, CHATS, 1, lambda: chat({}, question="<sop>")),
    "what a template drops": (2, CHATS, 1, lambda: chat({"content": "So: <think>why</think>That"})),
    "ids outside the vocabulary": (2, {"train_iters": 1}, 1, lambda: rows({"input_ids": [1, 2, 64]})),
    "no cache": (2, {"data_cache_path": "train.jsonl/cache", "train_iters": 1}, 1, None),
    "six ranks": (2, LAYOUT | {"train_iters": 1}, 6, None),
    "experts": (2, {"expert_model_parallel_size": 3, "train_iters": 1}, 3, None),
    "batch": (2, {"global_batch_size": 6, "train_iters": 1}, 4, None),
    "2 CP": (2, LAYOUT | {"seq_length": 20, "train_iters": 1}, 8, None),
    "sequence parallelism": (2, {"tensor_model_parallel_size": 2, "train_iters": 1}, 2, None),
    "hybrid": (2, {"moe_token_dispatcher_type": "hybrid", "train_iters": 1}, 1, None),
    "bf16": (2, {"attention_backend": "cudnn", "train_iters": 1}, 1, None),
    "packages": (2, SERVED | {"attention_backend": "tilelang", "bf16": True, "train_iters": 1}, 1, None),
    "a name of the hub": (2, {"preset": "zai-org/GLM-5.2", "train_iters": 1}, 1, None),
    "scaled positions": (2, {"preset": "hf", "train_iters": 1}, 1, lambda: hf_config(rope_parameters=YARN)),
    "an unknown key": (2, {"preset": "hf", "train_iters": 1}, 1, lambda: hf_config(sliding_window=4096)),
    "another format": (2, {"preset": "hf", "train_iters": 1}, 1, lambda: hf_config(quantization_config=NVFP4)),
    "a pointer": (2, {"preset": None, "load_hf": "hf", "train_iters": 1}, 1, pointer),
    "fewer layers": (2, {"load": "tuned", "train_iters": 4, "num_layers": 2}, 1, trained),
    "no checkpoint": (2, {"load": "run/base", "train_iters": 1}, 1, None),
    "another model": (2, {"preset": "glm5", "load": "tuned", "train_iters": 1}, 1, trained),
    "another order": (2, {"load": "tuned", "train_iters": 4, "seq_length": 32}, 1, trained),
    "damaged": (2, {"load": "tuned", "train_iters": 4}, 1, damaged),
    "a lost pointer": (2, {"load": "tuned", "train_iters": 4}, 1, without_pointer),
    "a run is there": (2, {"save": "tuned", "train_iters": 4}, 1, trained),
    "not finite": (1, {"lr": 1e30, "train_iters": 4}, 1, None),
    "not writable": (1, {"save": "train.jsonl/run", "train_iters": 1}, 1, None),
}


def mistake(capsys, flags: dict) -> tuple[int, str]:
    """Exit code and what the run wrote to standard error."""
    with pytest.raises(SystemExit) as stop, one_line_errors():
        finetune(**flags)
    return stop.value.code, capsys.readouterr().err


def explained() -> list[str]:
    """The messages of docs/troubleshooting.md as patterns."""
    messages = re.findall(r"^### `(error: .+)`$", TROUBLESHOOTING.read_text(), re.M)
    return [re.escape(message).replace("…", ".+") for message in messages]


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_one_line_that_the_documentation_explains(name, tmp_path, monkeypatch, capsys):
    code, flags, ranks, prepare = CASES[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(backends, "find_spec", lambda module: None)  # a machine without the GPU packages
    write_rows(tmp_path)
    if prepare is not None:
        prepare()
    capsys.readouterr()
    if ranks > 1:
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
    found, text = mistake(capsys, flags)
    assert text.endswith("\n") and text.count("\n") == 1
    assert found == code
    assert any(re.fullmatch(pattern, text.rstrip("\n")) for pattern in explained()), text


def test_every_explained_error_is_made():
    assert len(explained()) == len(CASES)
