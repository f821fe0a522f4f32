"""tools/score.py against log-softmax sums of transformers, in one process and in several layouts."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.helpers import distributed, small_model
from tests.helpers.rows import tokenise
from tests.helpers.tools import call


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return small_model.make(tmp_path_factory.mktemp("model") / "hf")


def write(path: Path, rows: Sequence[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def score(folder: Path, file: str, *words: str) -> list[dict]:
    code, out, err = call("score", "--load-hf", str(folder), "--data-path", file, *words)
    assert code == 0, err
    return [json.loads(line) for line in out.splitlines()]


def expected(folder: Path, ids: Sequence[int], targets: Sequence[bool]) -> list[float]:
    """The log-probability of each target in transformers."""
    ids = torch.as_tensor(ids)
    with torch.no_grad():
        logits = small_model.in_transformers(folder)(ids.unsqueeze(0)).logits[0].double()
    found = logits[:-1].log_softmax(-1).gather(1, ids[1:].unsqueeze(1)).squeeze(1)
    return found[torch.as_tensor(targets)[1:]].tolist()


def rows() -> list[dict]:
    chat = [{"role": "user", "content": "Why is the sky blue?"}, {"role": "assistant", "content": "It scatters light."}]
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(1, 256, (n,), generator=generator).tolist() for n in (2, 9, 40)]
    labelled = [{"input_ids": i, "labels": [-100] * (len(i) // 2) + i[len(i) // 2 :]} for i in ids]
    return [{"messages": chat}, {"prompt": "One, two, ", "completion": "three."}, *labelled, {"input_ids": ids[1]}]


def wanted(folder: Path, data: Sequence[dict]) -> list[list[float]]:
    made = tokenise(folder, *data)
    ends = made.lengths.cumsum()
    spans = [slice(end - length, end) for end, length in zip(ends, made.lengths, strict=True)]
    return [expected(folder, made.ids[span], made.targets[span]) for span in spans]


def test_scores_are_those_of_transformers(folder, tmp_path):
    found = score(folder, write(tmp_path / "rows.jsonl", rows()), "--token-logprobs")
    for number, (line, values) in enumerate(zip(found, wanted(folder, rows()), strict=True)):
        assert line["token_logprobs"] == pytest.approx(values, abs=5e-5)
        assert line["sum_logprob"] == pytest.approx(sum(values), abs=1e-5 * len(values))
        assert (line["id"], line["tokens"]) == (number, len(values))
        assert line["mean"] == line["sum_logprob"] / line["tokens"]
    assert len({line["digest"] for line in found}) == len(found) and len({line["model"] for line in found}) == 1


def test_packing_and_truncation(folder, tmp_path):
    """What shares a pack changes nothing; what is cut off does not count; the digest is that of what is left."""
    file = write(tmp_path / "rows.jsonl", rows())
    alone, packed = score(folder, file), score(folder, file, "--seq-length", "256")
    for one, other in zip(alone, packed, strict=True):
        assert other["sum_logprob"] == pytest.approx(one["sum_logprob"], abs=5e-5)
        assert other["digest"] == one["digest"]
    code, out, err = call("score", "--load-hf", str(folder), "--data-path", file, "--seq-length", "32")
    assert code == 2 and not out and "2 of 6 documents are above --seq-length 32, the longest has" in err
    cut = score(folder, file, "--seq-length", "32", "--overlong", "truncate")
    assert cut[4]["tokens"] == 32 - 20 and cut[4]["digest"] != alone[4]["digest"]
    assert cut[2]["sum_logprob"] == pytest.approx(alone[2]["sum_logprob"], abs=5e-5)


LAYOUTS = {
    "tp2 cp2": "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2",
    "pp2 ep2": "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2",
    "dp4": "",
}


def in_layouts(folder: Path, file: str) -> dict[str, list[dict]]:
    os.environ |= {"WORLD_SIZE": str(dist.get_world_size()), "RANK": str(dist.get_rank())}
    return {name: score(folder, file, *flags.split()) for name, flags in LAYOUTS.items()}


def test_every_layout_has_the_same_scores(folder, tmp_path):
    data = rows() * 3
    first, *others = distributed.run(4, in_layouts, folder, write(tmp_path / "rows.jsonl", data), timeout=240)
    values = [sum(each) for each in wanted(folder, data)]
    for name, lines in first.items():
        assert [line["sum_logprob"] for line in lines] == pytest.approx(values, abs=1e-4), name
        assert [line["id"] for line in lines] == list(range(len(data)))
    assert not any(any(other.values()) for other in others)


def test_pairs_have_two_scores(folder, tmp_path):
    prompt = [{"role": "user", "content": "Why?"}]
    answers = [[{"role": "assistant", "content": text}] for text in ("Because it is so.", "No.")]
    [line] = score(
        folder, write(tmp_path / "p.jsonl", [{"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}])
    )
    for side, answer in zip(("chosen", "rejected"), answers, strict=True):
        [values] = wanted(folder, [{"messages": prompt + answer}])
        assert line[side]["sum_logprob"] == pytest.approx(sum(values), abs=1e-4)
        assert line[side]["tokens"] == len(values)


def test_what_truncation_leaves_nothing_of_is_left_out_as_in_training(folder, tmp_path):
    """So that the same flags give the reference of the pairs that are trained on."""
    pairs = [{"prompt": "a" * n, "chosen": "b", "rejected": "c"} for n in (40, 3)]
    words = ("--seq-length", "24", "--overlong", "truncate")
    file = write(tmp_path / "p.jsonl", pairs)
    code, out, err = call("score", "--load-hf", str(folder), "--data-path", file, *words)
    assert code == 0 and "1 of 2 pairs have no token that counts, the first is number 1: left out" in err
    assert [json.loads(line)["id"] for line in out.splitlines()] == [1]


@pytest.mark.parametrize(
    ("data", "words", "message"),
    [
        (
            [{"input_ids": [1, 2], "labels": [-100, -100]}, {"input_ids": [1, 2]}],
            "",
            "1 of 2 documents have no token that counts, the first is number 1",
        ),
        ([{"input_ids": [1, 2]}, {"chosen": "a", "rejected": "b"}], "", "p.jsonl:2: "),
        ([{"chosen": [1], "rejected": "b"}, {"input_ids": [1, 2]}], "", "p.jsonl:1: chosen and rejected must be two"),
        ([{"input_ids": [1, 2]}], "--overlong split", "--overlong split: a completion is scored whole"),
        ([{"input_ids": [1] * 5000}], "", "exceeds max_position_embeddings (4096)"),
        ([{"input_ids": [1, 2]}], "--seq-length 5000", "--seq-length (5000) exceeds max_position_embeddings (4096)"),
    ],
)
def test_what_cannot_be_scored(folder, tmp_path, data, words, message):
    file = write(tmp_path / "p.jsonl", data)
    code, out, err = call("score", "--load-hf", str(folder), "--data-path", file, *words.split())
    assert code == 2 and not out and message in err


def test_the_data_are_needed(folder):
    code, out, err = call("score", "--load-hf", str(folder))
    assert (code, out) == (2, "") and "--data-path is required" in err
