"""What a checkpoint or Hugging Face folder holds and whether it is whole, for people."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import torch

from ..config import iterations
from ..config.model import ModelConfig
from ..config.parameters import ADAPTER
from ..config.source import require_folder
from . import hf, sharded
from .adapters import AdapterCheckpoint
from .files import UNFINISHED
from .output import OutputFile

SHOWN_FAULTS = 10


def human(nbytes: float) -> str:
    """1234567 -> "1.2 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} TB"


def dry_run(files: list[OutputFile], target: Path) -> Iterator[str]:
    """A line for each file that a conversion would write into `target`, and one for their sum."""
    for file in files:
        span = file.keys[0] if len(file.keys) == 1 else f"{file.keys[0]} … {file.keys[-1]}"
        yield f"{file.name}  {human(file.nbytes)}  {len(file.keys)} tensors  {span}"
    tensors = len({key for file in files for key in file.keys})
    nbytes = sum(file.nbytes for file in files)
    yield f"would write {len(files)} files with {tensors} tensors, {nbytes} bytes ({human(nbytes)}), to {target}"


def inspect(folder: Path, data: bool, show: Callable[[str], object]) -> None:
    """Shows model, layout, iteration, sizes and integrity of a checkpoint (its latest, or one iter_…) or HF folder.

    data: read every stored byte and compare its checksum, too (of a Hugging Face folder there are none).
    Raises: ValueError that lists the first faults, after showing what could be read.
    """
    require_folder(folder)
    if not iterations.any_saved(folder):
        _inspect_hf(folder, data, show)
        return
    there = sorted(path.name for path in folder.glob(iterations.ITERATIONS))
    if there or (folder / iterations.LATEST_NAME).exists():
        show(f"checkpoints  {', '.join(there) or 'none'}")
        for path in sorted(folder.glob("*" + UNFINISHED)):
            show(f"unfinished   {path.name}")
        if (fault := iterations.pointer_fault(folder)) is not None:
            raise ValueError(f"{fault}: inspect one iter_… folder")
        if (latest := iterations.latest(folder)) is None:
            raise ValueError(f"{folder} has no {iterations.LATEST_NAME}: no save in it was completed")
        show(f"latest       iteration {latest}")
        folder = iterations.iteration_folder(folder, latest)
    reader = sharded.Reader(folder)
    config = ModelConfig.from_hf(folder / "config.json")
    _show_model(config, show)
    _show_stored(reader, show)
    there = (folder / "state.json").is_file()
    show(f"state        {json.dumps(sharded.state_of(folder), indent=2) if there else 'missing'}")
    faults = list(_faults(reader, config, data))
    if faults:
        more = f"; and {len(faults) - SHOWN_FAULTS} more" if len(faults) > SHOWN_FAULTS else ""
        raise ValueError("; ".join(faults[:SHOWN_FAULTS]) + more)
    depth = "every byte has the checksum it was saved with" if data else "files and their checksums are there"
    show(f"integrity    good: {depth}{'' if data else ' (--verify reads the data, too)'}")


def _show_model(config: ModelConfig, show: Callable[[str], object]) -> None:
    parameters = sum(math.prod(shape) for shape, _ in hf.parameter_shapes(config).values())
    show(
        f"model        {parameters:,} parameters: {config.num_hidden_layers} layers, hidden {config.hidden_size}, "
        f"{config.n_routed_experts} experts, vocabulary {config.vocab_size}, "
        f"{config.num_nextn_predict_layers} MTP layers, {config.dtype}"
    )


def _show_stored(reader: sharded.Reader, show: Callable[[str], object]) -> None:
    sizes = {"weights": 0, "optimizer": 0}
    for name, (shape, dtype) in reader.shapes.items():
        sizes["optimizer" if name.startswith("optimizer.") else "weights"] += math.prod(shape) * dtype.itemsize
    dtypes = _counted(dtype for _, dtype in reader.shapes.values())
    files = reader.index.by_file()
    writers = {name.split("_")[0] for name in files if name.startswith("rank")}
    made = f"saved by {len(writers)} processes" if writers else "converted"
    chunks = sum(map(len, files.values()))
    show(f"iteration    {reader.folder.name.removeprefix('iter_')}, {made}")
    show(f"layout       {len(reader.shapes)} tensors in {chunks} chunks in {len(files)} files; {dtypes}")
    show(f"sizes        weights {human(sizes['weights'])}, optimizer {human(sizes['optimizer'])}")


def _counted(dtypes: Iterable[torch.dtype]) -> dict[str, int]:
    """{"bfloat16": number of tensors, …}, in the order in which they come."""
    return dict(Counter(str(dtype).removeprefix("torch.") for dtype in dtypes))


def _faults(reader: sharded.Reader, config: ModelConfig, data: bool) -> Iterator[str]:
    whole = {name: shape for name, (shape, _) in hf.parameter_shapes(config).items()}
    adapters = any(name.endswith(ADAPTER) for name in reader.shapes)
    checks: list[Callable[[], object]] = [
        lambda: AdapterCheckpoint(reader.folder) if adapters else reader.require(whole),
        lambda: sharded.state_of(reader.folder),
    ]
    for chunks in reader.index.by_file().values():
        checks.append(partial(reader.check_data if data else reader.check_file, chunks))
    for check in checks:
        try:
            check()
        except (ValueError, OSError) as error:
            yield str(error)


def _inspect_hf(folder: Path, data: bool, show: Callable[[str], object]) -> None:
    if data:
        raise ValueError(f"{folder}: a Hugging Face folder has no checksums that --verify could compare")
    checkpoint = hf.HFCheckpoint(folder)
    entries = checkpoint.source.entries
    files = {entry.file for entry in entries.values()}
    _show_model(checkpoint.config, show)
    dtypes = _counted(entry.dtype for entry in entries.values())
    show(f"layout       Hugging Face folder: {len(entries)} tensors in {len(files)} files; {dtypes}")
    show(f"sizes        {human(sum(entry.end - entry.start for entry in entries.values()))}")
    show("integrity    good: every tensor of the model is there, and whole by its size")
