"""Which iteration a run loads, and what it may not replace or pass over: all from the names in a folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_glm.config import iterations
from tests.helpers.finetune import finetune, tensors, write_rows


def folder_of(path: Path, complete: tuple[int, ...], pointer: str | None, incomplete: int | None = None) -> Path:
    for iteration in complete:
        path.joinpath(f"iter_{iteration:07d}").mkdir(parents=True)
        path.joinpath(f"iter_{iteration:07d}", "tensors.index").touch()
    if incomplete is not None:
        path.joinpath(f"iter_{incomplete:07d}").mkdir(parents=True)
    path.mkdir(exist_ok=True)
    if pointer is not None:
        path.joinpath(iterations.LATEST_NAME).write_text(pointer)
    return path


FAULTS = {
    "missing": ((3, 6), None, None, "is missing; complete iterations there: 3, 6"),
    "unreadable": ((3, 6), "six", None, "holds 'six', it should hold an iteration number"),
    "empty": ((3, 6), "", None, "holds '', it should hold an iteration number"),
    "stale": ((3, 6), "3", None, "names iteration 3, but later ones are there"),
    "gone": ((3, 6), "9", None, "names iter_0000009, which is missing; complete iterations there: 3, 6"),
    "incomplete": ((3, 6), "9", 9, "names iter_0000009, which is incomplete"),
}


@pytest.mark.parametrize("complete, pointer, incomplete, fault", FAULTS.values(), ids=FAULTS)
def test_a_pointer_that_does_not_name_the_last_iteration(tmp_path, complete, pointer, incomplete, fault):
    """No run starts from or saves to the folder until --ckpt-step names the last iteration."""
    folder = folder_of(tmp_path / "out", complete, pointer, incomplete)
    with pytest.raises(ValueError, match=rf"--load {folder}: .*{fault}.*choose one with --ckpt-step, for example 6"):
        iterations.start(folder)
    for begins in (0, 3):
        words = rf"--save {folder} already holds iteration 6, this run starts after {begins}.*--ckpt-step 6"
        with pytest.raises(ValueError, match=words):
            iterations.check_save(folder, begins, None)
    with pytest.raises(ValueError, match=rf"--save {folder}: .*{fault}.*--ckpt-step 6"):
        iterations.check_save(folder, 6, (tmp_path / "other", 6))
    source = iterations.start(folder, 6)
    assert source == (folder, 6)
    iterations.check_save(folder, 6, source)


def test_a_good_pointer_and_an_empty_folder(tmp_path):
    folder = folder_of(tmp_path / "out", (0, 3, 6), "6\n", 7)
    assert iterations.start(folder) == (folder, 6) and iterations.pointer_fault(folder) is None
    assert iterations.start(folder, 3) == (folder, 3)
    iterations.check_save(folder, 6, (folder, 6))
    iterations.check_save(folder, 8, (tmp_path / "other", 8))
    with pytest.raises(ValueError, match="already holds iteration 6, this run starts after 3: resume with --load"):
        iterations.check_save(folder, 3, (folder, 3))
    iterations.check_save(folder_of(tmp_path / "new", (), None), 0, None)
    with pytest.raises(ValueError, match="holds no checkpoint"):
        iterations.start(tmp_path / "new")
    with pytest.raises(ValueError, match="--ckpt-step 7: .* has no such complete iteration; there: 0, 3, 6"):
        iterations.start(folder, 7)
    moved = folder_of(tmp_path / "moved", (), "6")
    with pytest.raises(ValueError, match="names iter_0000006, which is missing.*remove latest_checkpointed"):
        iterations.check_save(moved, 0, None)


def test_load_may_name_one_iteration(tmp_path, monkeypatch):
    folder = folder_of(tmp_path / "out", (3, 6), "3", 7)
    for name in ("iter_0000006", "iter_0000006/", "./iter_0000006"):
        assert iterations.start(f"{folder}/{name}") == (folder, 6)
    assert iterations.start(folder / "iter_0000006", 6) == (folder, 6)
    os.symlink(folder / "iter_0000003", tmp_path / "best")
    assert iterations.start(tmp_path / "best") == (folder, 3)
    monkeypatch.chdir(folder / "iter_0000006")
    assert iterations.start(".") == (folder, 6)
    with pytest.raises(ValueError, match="iter_0000006 is iteration 6, --ckpt-step is 3"):
        iterations.start(folder / "iter_0000006", 3)
    with pytest.raises(ValueError, match="iter_0000007 is no complete checkpoint"):
        iterations.start(folder / "iter_0000007")
    os.rename(folder / "iter_0000003", tmp_path / "good")
    with pytest.raises(ValueError, match="rename it"):
        iterations.start(tmp_path / "good")


def test_what_a_kill_before_the_pointer_left_counts_as_not_saved(tmp_path):
    folder = folder_of(tmp_path / "out", (3, 6), "3")
    (folder / "iter_0000006" / iterations.PENDING).touch()
    assert iterations.start(folder) == (folder, 3) and iterations.saved(folder) == [3]
    iterations.check_save(folder, 3, (folder, 3))
    (folder / iterations.LATEST_NAME).write_text("6")  # a kill after the pointer
    assert iterations.start(folder) == (folder, 6) and iterations.saved(folder) == [3, 6]


def test_a_lost_pointer_is_refused_before_the_data_is_read_and_repaired_by_ckpt_step(tmp_path, monkeypatch, capsys):
    write_rows(tmp_path)
    monkeypatch.chdir(tmp_path)
    finetune(train_iters=2, save="out", save_interval=1)
    pointer = Path("out") / iterations.LATEST_NAME
    pointer.unlink()
    with pytest.raises(ValueError, match="--save out already holds iteration 2.*missing.*--load out --ckpt-step 2"):
        finetune(train_iters=2, save="out", data_path="no-such-file.jsonl")
    finetune(preset=None, load="out", ckpt_step=2, save="out", train_iters=3)
    assert f"{pointer} now names iteration 2" in capsys.readouterr().out
    assert iterations.saved(Path("out")) == [1, 2, 3] and pointer.read_text() == "3"


def test_weights_only_checkpoints_and_what_keep_last_leaves(tmp_path, monkeypatch):
    write_rows(tmp_path)
    monkeypatch.chdir(tmp_path)
    flags = {"save": "out", "save_interval": 1, "no_save_optim": True, "keep_last": 2, "save_retain_interval": 2}
    finetune(train_iters=5, **flags)
    assert iterations.saved(Path("out")) == [2, 4, 5]
    assert not [name for name in tensors("out", 5) if name.startswith("optimizer.")]
    resume = {"preset": None, "load": "out", "train_iters": 6}
    with pytest.raises(ValueError, match="iteration 5 holds no optimizer state.*--no-load-optim.*--finetune"):
        finetune(**resume, data_path="no-such-file.jsonl")
    finetune(**resume, no_load_optim=True)
    finetune(**resume | {"train_iters": 1}, finetune=True)
