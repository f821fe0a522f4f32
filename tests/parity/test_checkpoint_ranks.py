"""Checkpoints written and read by several processes over a gloo group of their own."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_glm.checkpoint import merge, sharded
from megatron_glm.config.model import ModelConfig
from megatron_glm.launch import is_shown_elsewhere
from megatron_glm.parallel.shard import Rectangle
from tests.helpers import distributed

SHAPES = {"norm.weight": (17,), "lm_head.weight": (24, 10), "layers.1.mlp.experts.gate_up": (6, 8, 5)}


def full(name: str) -> torch.Tensor:
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(len(name)))


def share(dim: int, rank: int, size: int, filled: bool) -> list[Rectangle]:
    """This rank's part of every matrix, cut along `dim`; vectors are replicated and owned by the last rank."""
    rectangles = []
    for name, shape in SHAPES.items():
        offsets, data = [0] * len(shape), full(name) if filled else torch.full(shape, torch.nan)
        if len(shape) > 1:
            data = data.tensor_split(size, dim)[rank].contiguous()
            offsets[dim] = sum(part.shape[dim] for part in full(name).tensor_split(size, dim)[:rank])
        rectangles.append(Rectangle(name, shape, tuple(offsets), data, len(shape) > 1 or rank == size - 1))
    return rectangles


def attempt(function, *args) -> str:
    try:
        function(*args)
    except ValueError as error:
        return str(error)
    return ""


def save_and_load(folder: Path) -> tuple[str, str, str]:
    """Saves rows, loads columns; returns the errors of a bad load, a bad save and of saving twice."""
    group = dist.new_group(backend="gloo")
    rank, size = group.rank(), group.size()
    config = ModelConfig.from_hf("glm5.2-tiny")
    sharded.save(folder, 5, share(0, rank, size, True), {"rank": rank}, config, None, group)
    assert sharded.latest(folder) == 5
    wanted = share(1, rank, size, False)
    sharded.load(folder, 5, wanted, group)
    for got, expected in zip(wanted, share(1, rank, size, True), strict=True):
        assert torch.equal(got.tensor, expected.tensor), got.name
    odd = [Rectangle("norm.weight", (18,), (0,), torch.zeros(18), False)] if rank == 1 else wanted
    unowned = [Rectangle(r.name, r.global_shape, r.offsets, r.tensor, rank == 0) for r in share(0, rank, size, True)]
    return (
        attempt(sharded.load, folder, 5, odd, group),
        attempt(sharded.save, folder, 6, unowned, {}, config, None, group),
        attempt(sharded.save, folder, 5, share(0, rank, size, True), {}, config, None, group),
    )


def test_two_ranks_reshard_and_fail_together(tmp_path: Path):
    for bad_load, bad_save, twice in distributed.run(2, save_and_load, tmp_path):
        assert "norm.weight is [17] in the checkpoint, [18] in the model" in bad_load
        assert "lm_head.weight write 120 elements of 240" in bad_save
        assert "iter_0000005 already exists" in twice
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000005", sharded.LATEST_NAME]
    assert sharded.state_of(sharded.iteration_folder(tmp_path, 5)) == {"rank": 0}

    alone = share(0, 0, 1, False)
    sharded.load(tmp_path, 5, alone, None)
    for rectangle in alone:
        assert torch.equal(rectangle.tensor, full(rectangle.name)), rectangle.name


SMALL = {"a": (1000,), "b": (7, 5), "c": (2,), "d": (9, 4, 3), "large": (64, 10)}


def small(name: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(SMALL[name], generator=torch.Generator().manual_seed(ord(name[0]))).to(dtype)


def rows(rank: int, size: int, filled: bool) -> list[Rectangle]:
    """As FSDP cuts: rows in equal parts, so that the last ranks may have none."""
    rectangles = []
    for name, shape in SMALL.items():
        for prefix, dtype in (("", torch.float32), ("moment.", torch.bfloat16)):
            part = -(-shape[0] // size)
            start = min(shape[0], rank * part)
            data = small(name, dtype)[start : start + part].clone()
            data = data if filled else torch.full_like(data, torch.nan)
            rectangles.append(Rectangle(prefix + name, shape, (start, *(0 for _ in shape[1:])), data, True))
    return rectangles


def save_in_blocks(folder: Path) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    config = ModelConfig.from_hf("glm5.2-tiny")
    merge.SMALL_BYTES, merge.BLOCK_BYTES = 600, 1500
    sharded.save(folder, 1, rows(rank, size, True), {}, config, None, dist.group.WORLD)
    wanted = rows(rank, size, False)
    sharded.load(folder, 1, wanted, dist.group.WORLD)
    assert all(torch.equal(got.tensor, there.tensor) for got, there in zip(wanted, rows(rank, size, True), strict=True))


def test_small_pieces_are_written_by_one_rank(tmp_path: Path):
    distributed.run(4, save_in_blocks, tmp_path)
    reader = sharded.Reader(tmp_path / "iter_0000001")
    by_file = reader.index.by_file()
    chunks = Counter(reader.index.piece(chunk).name for part in by_file.values() for chunk in part)
    one = ("b", "c", "d", "moment.b", "moment.c", "moment.d", "moment.large")  # 320 bytes a rank
    assert chunks == dict.fromkeys(one, 1) | {"a": 4, "moment.a": 2, "large": 4}  # a: above 600; 500 + 500 + 500 + 500
    assert len({name.split("_")[0] for name in by_file}) == 4, "every rank writes a share"
    for name in SMALL:
        for prefix, dtype in (("", torch.float32), ("moment.", torch.bfloat16)):
            stored = reader.tensor(prefix + name, (0,) * len(SMALL[name]), SMALL[name], dtype)
            assert torch.equal(stored, small(name, dtype)), prefix + name


def test_a_changed_byte_of_a_block_shows_to_whoever_reads_a_part_of_it(tmp_path: Path):
    distributed.run(4, save_in_blocks, tmp_path)
    raw = small("b", torch.float32)[6].numpy().tobytes()  # of the last rank
    [file] = [f for f in tmp_path.rglob("*.distcp") if raw in f.read_bytes()]
    content = bytearray(file.read_bytes())
    content[content.index(raw)] ^= 1
    file.write_bytes(content)
    wanted = [r for r in rows(0, 4, False) if r.name == "b"]
    with pytest.raises(ValueError, match=f"{file} is damaged: b at "):
        sharded.load(tmp_path, 1, wanted, None)


def save_with_a_rank_that_cannot_read(folder: Path) -> str:
    def fails(chunks: list) -> torch.Tensor:
        raise ValueError("no room for the pieces")

    if dist.get_rank() == 2:
        merge._packed = fails
    return attempt(save_in_blocks, folder)


def test_a_rank_that_fails_before_pieces_travel_leaves_no_other_waiting(tmp_path: Path):
    told = distributed.run(4, save_with_a_rank_that_cannot_read, tmp_path, timeout=20)
    assert told == ["rank 2: no room for the pieces"] * 2 + ["no room for the pieces", told[0]]
    assert not list(tmp_path.glob("iter_*"))


def save_alone(folder: Path) -> None:
    sharded.save(folder, 1, share(0, 0, 1, True), {}, ModelConfig.from_hf("glm5.2-tiny"), None, dist.group.WORLD)
    wanted = share(0, 0, 1, False)
    sharded.load(folder, 1, wanted, dist.group.WORLD)
    assert all(torch.equal(r.tensor, full(r.name)) for r in wanted)


def test_a_group_of_one(tmp_path: Path):
    distributed.run(1, save_alone, tmp_path)


def failing() -> tuple[str, bool, str]:
    def local() -> None:
        if dist.get_rank() > 0:
            raise OSError("the disk is full")

    try:
        sharded.together(dist.group.WORLD, local)
    except Exception as error:
        return type(error).__name__, is_shown_elsewhere(error), str(error)


def test_an_error_of_several_ranks_is_shown_once():
    found = distributed.run(3, failing)
    on_first = ("OSError", True, "rank 1: the disk is full; rank 2: the disk is full")
    assert found == [on_first, ("OSError", False, "the disk is full"), ("OSError", True, "the disk is full")]
