"""Sharded checkpoints: any rectangles load from any chunks, and a folder is complete or not there.

One process may hold the rectangles of all ranks of a layout, so layouts are simulated here without process groups.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

from megatron_glm.checkpoint import archives, chunks, files, index, sharded
from megatron_glm.checkpoint.files import staged_folder, write_durably
from megatron_glm.config import iterations
from megatron_glm.config.model import ModelConfig
from megatron_glm.parallel.shard import Rectangle

CONFIG = ModelConfig.from_hf("glm5.2-tiny")
SHAPES = {"norm.weight": (17,), "lm_head.weight": (23, 10), "layers.1.mlp.experts.gate_up": (6, 8, 5)}


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch):
    """Waiting for the disk shows nothing here and takes most of the time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def layout(dim: int, bounds: list[float], source: dict[str, torch.Tensor] | None) -> list[Rectangle]:
    """All ranks' rectangles of a split of `dim` (modulo the tensor's dims) at the fractions `bounds`."""
    rectangles = []
    for name, shape in SHAPES.items():
        axis = dim % len(shape)
        cuts = [0, *(round(bound * shape[axis]) for bound in bounds), shape[axis]]
        for start, stop in zip(cuts, cuts[1:], strict=False):
            index = tuple(slice(start, stop) if d == axis else slice(None) for d in range(len(shape)))
            offsets = tuple(start if d == axis else 0 for d in range(len(shape)))
            full = torch.full(shape, torch.nan) if source is None else source[name]
            rectangles.append(Rectangle(name, shape, offsets, full[index], owner=True))
    return rectangles


def gathered(rectangles: list[Rectangle]) -> dict[str, torch.Tensor]:
    result = {name: torch.full(shape, torch.nan) for name, shape in SHAPES.items()}
    for r in rectangles:
        index = tuple(slice(o, o + s) for o, s in zip(r.offsets, r.tensor.shape, strict=True))
        result[r.name][index] = r.tensor
    return result


def save(folder: Path, rectangles: list[Rectangle], iteration: int = 4) -> None:
    sharded.save(folder, iteration, rectangles, {"consumed": 12}, CONFIG, None, None)


# dim, bounds: whole tensors, rows, columns, experts or rows unevenly, with empty ranks as FSDP leaves them
LAYOUTS = [(0, []), (0, [0.5]), (-1, [0.3, 0.6]), (1, [0.25, 0.5, 0.75]), (0, [0.1, 0.1, 0.9, 1.0])]


@pytest.mark.parametrize("chunk_bytes", [48, 1 << 28])
def test_every_layout_loads_every_other(chunk_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", chunk_bytes)
    expected = tensors()
    for number, (dim, bounds) in enumerate(LAYOUTS):
        save(tmp_path, layout(dim, bounds, expected), iteration=number)
        for other_dim, other_bounds in LAYOUTS:
            wanted = layout(other_dim, other_bounds, None)
            sharded.load(tmp_path, number, wanted, None)
            for name, tensor in gathered(wanted).items():
                assert torch.equal(tensor, expected[name]), (name, dim, bounds, other_dim, other_bounds)


def test_only_owners_write_and_parameters_are_filled_in_place(tmp_path: Path):
    expected = tensors()
    copies = [Rectangle(r.name, r.global_shape, r.offsets, r.tensor * 0, False) for r in layout(0, [0.5], expected)]
    save(tmp_path, copies + layout(0, [], expected))
    parameter = torch.nn.Parameter(torch.zeros(23, 4, dtype=torch.bfloat16))
    sharded.load(tmp_path, 4, [Rectangle("lm_head.weight", (23, 10), (0, 3), parameter, False)], None)
    assert torch.equal(parameter, expected["lm_head.weight"][:, 3:7].bfloat16())
    assert parameter.is_leaf and parameter.requires_grad


def test_folder_describes_itself(tmp_path: Path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "tokenizer.json").write_bytes(b"\r\n")
    assert sharded.latest(tmp_path) is None
    sharded.save(tmp_path, 100, layout(0, [], tensors()), {"consumed": 12}, CONFIG, tmp_path / "hf", None)
    folder = tmp_path / "iter_0000100"
    assert sharded.latest(tmp_path) == 100
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "100"
    assert sharded.state_of(sharded.iteration_folder(tmp_path, 100)) == {"consumed": 12}
    assert ModelConfig.from_hf(folder) == CONFIG
    assert (folder / "hf" / "tokenizer.json").read_bytes() == b"\r\n"
    assert not [path for path in tmp_path.rglob("*.tmp")]


@pytest.mark.parametrize("shape, itemsize", [((7, 9), 4), ((5, 3, 4), 2), ((40,), 4), ((2, 40, 3), 4), ((3, 1000), 2)])
def test_chunks_fill_the_tensor_and_stay_small(shape, itemsize, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 100)
    filled = torch.zeros(shape, dtype=torch.int)
    for offsets, sizes in chunks.cut(shape, itemsize):
        filled[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
        assert torch.Size(sizes).numel() * itemsize <= 100 or sizes[-2] == 1, "only a single row may be larger"
        assert len(shape) < 3 or sizes[0] == 1
    assert (filled == 1).all()
    assert list(chunks.cut((0, 4), 4)) == []


def test_stored_chunks_are_at_most_256_mib():
    assert chunks.CHUNK_BYTES == 256 * 2**20
    sizes = [size for _, size in chunks.cut((154880, 6144), 4)]
    assert max(torch.Size(size).numel() * 4 for size in sizes) <= 256 * 2**20


def test_files_stay_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One file is synced while the next is written."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 200)
    monkeypatch.setattr(sharded, "FILE_BYTES", 500)
    save(tmp_path, layout(0, [], tensors()))
    assert len(list((tmp_path / "iter_0000004").glob("*.distcp"))) >= (17 + 230 + 240) * 4 // 500


def test_reading_opens_each_file_once_and_keeps_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On a shared file system an open costs more than a small chunk; and a process may open only so many."""
    monkeypatch.setattr(sharded, "FILE_BYTES", 1000)
    save(tmp_path, layout(0, [], tensors()))
    count = len(list((tmp_path / "iter_0000004").glob("*.distcp")))
    opened, mapping = [], archives.mapping
    monkeypatch.setattr(archives, "mapping", lambda file, *span: opened.append(file) or mapping(file, *span))
    before = len(os.listdir("/proc/self/fd"))
    reader = sharded.Reader(tmp_path / "iter_0000004")
    reader.read(layout(0, [], None))
    assert 1 < count == len(opened) < sum(map(len, reader.index.by_file().values()))
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    del reader
    assert len(os.listdir("/proc/self/fd")) <= before


def test_another_model_is_one_error_with_both_shapes(tmp_path: Path):
    save(tmp_path, layout(0, [], tensors()))
    wanted = [
        Rectangle(name, (*shape[:-1], 99), (0,) * len(shape), torch.zeros(1), False) for name, shape in SHAPES.items()
    ]
    wanted += [Rectangle(f"layers.9.{i}", (3,), (0,), torch.zeros(3), False) for i in range(4)]
    with pytest.raises(ValueError) as error:
        sharded.load(tmp_path, 4, wanted, None)
    text = str(error.value)
    assert "iter_0000004" in text and "lm_head.weight is [23, 10] in the checkpoint, [23, 99] in the model" in text
    assert "layers.9.0 [3] is not in the checkpoint" in text and "and 2 more" in text


def test_optimizer_free_load_reads_a_checkpoint_with_optimizer(tmp_path: Path):
    parameters = layout(0, [], tensors())
    moments = [
        Rectangle(f"optimizer.exp_avg.{r.name}", r.global_shape, r.offsets, r.tensor * 2, True) for r in parameters
    ]
    save(tmp_path, parameters + moments)
    wanted = layout(0, [0.5], None)
    sharded.load(tmp_path, 4, wanted, None)
    assert torch.equal(gathered(wanted)["norm.weight"], tensors()["norm.weight"])


@pytest.mark.parametrize("fault", ["nobody", "twice", "dtype"])
def test_tensors_must_be_written_exactly_once(fault: str, tmp_path: Path):
    rectangles = layout(0, [0.5], tensors())
    if fault == "nobody":
        del rectangles[0]
    elif fault == "twice":
        rectangles += layout(-1, [0.5], tensors())[:1]
    else:
        first = rectangles[0]
        rectangles[0] = Rectangle(first.name, first.global_shape, first.offsets, first.tensor.bfloat16(), True)
    with pytest.raises(ValueError, match=r"norm\.weight"):
        save(tmp_path, rectangles)
    assert not any(tmp_path.iterdir())


def test_a_failed_save_keeps_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save(tmp_path, layout(0, [], tensors()), iteration=1)

    def full_disk(*_):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(sharded, "write_file", full_disk)
        with pytest.raises(OSError, match="no space"):
            save(tmp_path, layout(0, [], tensors()), iteration=2)
    assert sharded.latest(tmp_path) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", sharded.LATEST_NAME]
    with pytest.raises(ValueError, match="iter_0000001 already exists"):
        save(tmp_path, layout(0, [], tensors()), iteration=1)
    assert sharded.latest(tmp_path) == 1


def test_what_a_killed_save_left_is_replaced(tmp_path: Path):
    (tmp_path / "iter_0000004.tmp").mkdir()
    (tmp_path / "iter_0000004.tmp" / "rank00000_00099.distcp").write_text("half")
    assert sharded.latest(tmp_path) is None
    save(tmp_path, layout(0, [], tensors()))
    assert len(list((tmp_path / "iter_0000004").glob("*.distcp"))) == 1 and not list(tmp_path.glob("*.tmp"))


def test_latest_moves_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    complete = []

    def record(path: Path, content: bytes) -> None:
        if path.name == sharded.LATEST_NAME:
            complete.append((tmp_path / "iter_0000004" / index.NAME).is_file())
        write_durably(path, content)

    monkeypatch.setattr(sharded, "write_durably", record)
    save(tmp_path, layout(0, [], tensors()))
    assert complete == [True]


def test_a_checkpoint_that_the_pointer_never_reached_is_replaced(tmp_path: Path):
    """A kill between the rename and the pointer; one that the pointer has passed is kept (above)."""
    save(tmp_path, layout(0, [], tensors()), iteration=1)
    pointer = (tmp_path / sharded.LATEST_NAME).read_bytes()
    save(tmp_path, layout(0, [], tensors(seed=5)), iteration=2)
    (tmp_path / sharded.LATEST_NAME).write_bytes(pointer)
    (tmp_path / "iter_0000002" / iterations.PENDING).touch()
    assert iterations.start(tmp_path) == (tmp_path, 1)
    save(tmp_path, layout(0, [0.5], tensors()), iteration=2)
    wanted = layout(0, [], None)
    sharded.load(tmp_path, sharded.latest(tmp_path), wanted, None)
    assert sharded.latest(tmp_path) == 2
    assert all(torch.equal(tensor, tensors()[name]) for name, tensor in gathered(wanted).items())


def test_the_converted_checkpoint_is_not_replaced(tmp_path: Path):
    save(tmp_path, layout(0, [], tensors()), iteration=0)
    with pytest.raises(ValueError, match="iter_0000000 already exists"):
        save(tmp_path, layout(0, [], tensors()), iteration=0)


def test_old_checkpoints_go_and_the_converted_one_and_newer_ones_stay(tmp_path: Path):
    for iteration in (0, 10, 20, 30, 40):
        save(tmp_path, layout(0, [], tensors()), iteration)
    write_durably(tmp_path / sharded.LATEST_NAME, b"30")  # 40 counts as not saved
    sharded.remove_old(tmp_path, keep=2)
    kept = ["iter_0000000", "iter_0000020", "iter_0000030", "iter_0000040", sharded.LATEST_NAME]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept


def test_an_old_checkpoint_that_stays_does_not_keep_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for iteration in (1, 2, 3, 4):
        save(tmp_path, layout(0, [], tensors()), iteration)
    rename = os.rename

    def busy(source: Path, target: Path) -> None:
        if source.name == "iter_0000001":
            raise PermissionError(1, "Operation not permitted", str(source))
        rename(source, target)

    monkeypatch.setattr(os, "rename", busy)
    with pytest.raises(PermissionError, match="iter_0000001"):
        sharded.remove_old(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000001", "iter_0000004"]


def test_two_runs_that_save_to_one_folder_do_not_mix(tmp_path: Path):
    with pytest.raises(OSError, match="out.tmp: two runs must not save"), staged_folder(tmp_path / "out") as first:
        (first / "file").write_text("first")
        with staged_folder(tmp_path / "out") as second:
            (second / "file").write_text("second")
    assert (tmp_path / "out" / "file").read_text() == "second"


def test_a_kill_while_old_checkpoints_go_leaves_none_that_looks_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for iteration in (10, 20):
        save(tmp_path, layout(0, [], tensors()), iteration)
    with monkeypatch.context() as patch:
        patch.setattr(files.shutil, "rmtree", lambda folder: (Path(folder) / index.NAME).unlink())
        sharded.remove_old(tmp_path, keep=1)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000010.tmp", "iter_0000020"]
    sharded.remove_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000020"]


@pytest.mark.parametrize("partner", [2, -1], ids=["of one size", "of another size"])
def test_swapped_files_are_named(partner: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also where every offset and length of the one fits the other: two experts of one tensor."""
    monkeypatch.setattr(sharded, "FILE_BYTES", 1)  # one chunk a file
    save(tmp_path, layout(0, [], tensors()))
    by_size = sorted((tmp_path / "iter_0000004").glob("*.distcp"), key=lambda file: file.stat().st_size)
    first, second = by_size[1], by_size[partner]
    contents = first.read_bytes(), second.read_bytes()
    assert (len(contents[0]) == len(contents[1])) == (partner == 2)
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    with pytest.raises(ValueError, match=f"{first.name}|{second.name}"):
        sharded.load(tmp_path, 4, layout(0, [], None), None)


def test_a_gap_that_an_overlap_makes_up_for_is_noticed(tmp_path: Path):
    """Rows 0-3 and 2-5 of six are six rows, at two places."""
    whole = torch.zeros(6, 4)
    halves = [Rectangle("w", (6, 4), (start, 0), whole[:3], True) for start in (0, 3)]
    save(tmp_path, halves, iteration=1)
    halves[1] = Rectangle("w", (6, 4), (2, 0), whole[:3], True)
    with pytest.raises(ValueError, match="the owners of w write 24 elements of 24; each must be written once"):
        save(tmp_path, halves, iteration=2)


def test_every_changed_byte_of_the_metadata_is_noticed(tmp_path: Path):
    save(tmp_path, layout(0, [], tensors()))
    file = tmp_path / "iter_0000004" / index.NAME
    content = file.read_bytes()
    for place in range(0, len(content), 97):
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(ValueError, match="tensors.index is damaged"):
            sharded.load(tmp_path, 4, layout(0, [], None), None)


def test_metadata_of_another_iteration_is_noticed(tmp_path: Path):
    for iteration in (1, 2):
        save(tmp_path, layout(0, [], tensors(seed=iteration)), iteration)
    (tmp_path / "iter_0000002" / index.NAME).write_bytes((tmp_path / "iter_0000001" / index.NAME).read_bytes())
    with pytest.raises(ValueError, match="is not the file that was saved"):
        sharded.load(tmp_path, 2, layout(0, [], None), None)


def test_a_damaged_state_is_named(tmp_path: Path):
    save(tmp_path, layout(0, [], tensors()))
    file = tmp_path / "iter_0000004" / "state.json"
    whole = file.read_bytes()
    assert sharded.state_of(sharded.iteration_folder(tmp_path, 4)) == {"consumed": 12}
    file.write_bytes(whole.replace(b"12", b"13", 1))
    with pytest.raises(ValueError, match=f"{file} is damaged: its checksum"):
        sharded.state_of(sharded.iteration_folder(tmp_path, 4))
    file.write_text('{"consumed": 12}')  # as earlier versions wrote it
    assert sharded.state_of(sharded.iteration_folder(tmp_path, 4)) == {"consumed": 12}
    file.write_bytes(whole[:-3])
    with pytest.raises(ValueError, match=str(file)):
        sharded.state_of(sharded.iteration_folder(tmp_path, 4))
    file.write_text("[]")
    with pytest.raises(ValueError, match=f"{file} is damaged"):
        sharded.state_of(sharded.iteration_folder(tmp_path, 4))


def test_every_changed_byte_of_a_tensor_is_noticed(tmp_path: Path):
    source = tensors()
    save(tmp_path, layout(0, [], source))
    [file] = (tmp_path / "iter_0000004").glob("*.distcp")
    content = file.read_bytes()
    for name, tensor in source.items():
        place = content.index(tensor.contiguous().view(-1).view(torch.uint8).numpy()[:8].tobytes())
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(ValueError, match=f"{file} is damaged: {name} at "):
            sharded.load(tmp_path, 4, layout(0, [], None), None)


def test_damaged_checkpoints_are_named(tmp_path: Path):
    save(tmp_path, layout(0, [], tensors()))
    folder = tmp_path / "iter_0000004"
    [data] = folder.glob("*.distcp")
    content, wanted = data.read_bytes(), layout(0, [], None)
    data.write_bytes(content[:-200])
    with pytest.raises(ValueError, match=rf"{data} is truncated: .* ends at byte {len(content)}"):
        sharded.load(tmp_path, 4, wanted, None)
    data.write_bytes(b"\0" * len(content))
    with pytest.raises(ValueError, match=f"{data}: cannot read "):
        sharded.load(tmp_path, 4, wanted, None)
    data.unlink()
    with pytest.raises(ValueError, match=f"{data} is missing"):
        sharded.load(tmp_path, 4, wanted, None)
    other = safetensors.numpy.save({"checkpoint": np.zeros(3)})  # of another program
    (folder / index.NAME).write_bytes(other + hashlib.sha256(other).digest())
    with pytest.raises(ValueError, match="tensors.index is damaged"):
        sharded.load(tmp_path, 4, wanted, None)
    (folder / index.NAME).write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="tensors.index is damaged"):
        sharded.load(tmp_path, 4, wanted, None)
    (folder / index.NAME).unlink()
    with pytest.raises(ValueError, match="iter_0000004 is no complete checkpoint"):
        sharded.load(tmp_path, 4, wanted, None)
    (tmp_path / sharded.LATEST_NAME).write_text("release")
    with pytest.raises(ValueError, match="'release'"):
        sharded.latest(tmp_path)


def test_staged_folder_vanishes_on_any_exception(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt), staged_folder(tmp_path / "out") as staging:
        (staging / "file").write_text("half")
        raise KeyboardInterrupt
    assert not any(tmp_path.iterdir())
