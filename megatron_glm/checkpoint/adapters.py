"""Checkpoints that hold adapters alone, and the frozen model under them: where it is, and whether it is still the same.

`state.json` of such a checkpoint has two entries more: `lora`, the settings of the adapters by the names of
`LoraConfig`, and `base`, the folder of the model with a digest of its config, its index and the sizes of its files.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import iterations
from ..config.lora import LoraConfig
from ..config.model import ModelConfig
from ..config.parameters import Parameter, adapter_parameters
from ..config.source import require_model
from . import index, sharded
from .safetensors_io import INDEX_NAME

SETTINGS = ("lora_rank", "lora_alpha", "lora_expert_rank", "lora_target_modules", "lora_rslora")
DIGITS = 16  # of a digest, hexadecimal


@dataclass(frozen=True)
class Base:
    """The model that adapters were trained on: a Hugging Face folder, or one `iter_…` folder of a checkpoint."""

    folder: Path
    digest: str

    @classmethod
    def of(cls, folder: Path) -> Base:
        """folder: also that of a checkpoint, whose latest iteration it then is. Raises ValueError if it holds none."""
        folder = base_folder(folder).resolve()
        ours = iterations.is_complete(folder)
        contents = [folder / "config.json", index.file_of(folder) if ours else folder / INDEX_NAME]
        found = hashlib.sha256()
        for file in contents:
            found.update(file.read_bytes() if file.is_file() else b"")
        for file in sorted(folder.glob("*.distcp" if ours else "*.safetensors")):
            found.update(f"{file.name} {file.stat().st_size}\n".encode())
        return cls(folder, found.hexdigest()[:DIGITS])

    def find(self, moved: str | Path | None = None) -> Path:
        """Where it is now: `moved` (of --base), or where it was. Raises ValueError if that is missing or another."""
        folder = self.folder if moved is None else base_folder(Path(moved)).resolve()
        if not folder.is_dir():
            raise ValueError(f"the model under the adapters was {folder}, which does not exist: --base DIR if it moved")
        if (found := Base.of(folder).digest) != self.digest:
            raise ValueError(
                f"{folder} is not the model under the adapters: its config, index and sizes have the digest {found}, "
                f"those of the model that they were trained on ({self.folder}) have {self.digest}"
            )
        return folder


def base_folder(folder: Path) -> Path:
    """One iteration of a checkpoint, or a Hugging Face folder. Raises ValueError if it is neither."""
    if iterations.is_complete(folder):
        return folder
    if iterations.any_saved(folder):
        return iterations.iteration_folder(*iterations.start(folder))
    require_model("--base", folder)
    return folder


def adapter_state(lora: LoraConfig, base: Base) -> dict[str, Any]:
    """What the state of a checkpoint of adapters has beside that of any run."""
    settings = asdict(lora)
    return {
        "lora": {name: settings[name] for name in SETTINGS},
        "base": {"folder": str(base.folder), "digest": base.digest},
    }


def read_adapter_state(folder: Path) -> tuple[LoraConfig, Base] | None:
    """The adapters of an `iter_…` folder and their model; None if it holds a whole model.

    Raises: ValueError naming a damaged state.json.
    """
    state = sharded.state_of(folder)
    if "lora" not in state:
        return None
    try:
        settings = state["lora"] | {"lora_target_modules": tuple(state["lora"]["lora_target_modules"])}
        return LoraConfig(**settings), Base(Path(state["base"]["folder"]), state["base"]["digest"])
    except (KeyError, TypeError) as error:
        file = folder / "state.json"
        raise ValueError(
            f"{file} is damaged, or of a later version: its adapters cannot be read ({error!r})"
        ) from error


class AdapterCheckpoint:
    """The adapters in an `iter_…` folder, as fp32 matrices.

    parameters: their declarations by canonical name.
    Raises: ValueError if the folder holds a whole model, or other tensors than its settings say.
    """

    def __init__(self, folder: Path) -> None:
        if (found := read_adapter_state(folder)) is None:
            raise ValueError(f"{folder} holds a whole model, no adapters: tools/convert_hf.py --load exports it")
        self.folder, (self.lora, self.base) = folder, found
        self.config = ModelConfig.from_hf(folder)
        self.parameters = adapter_parameters(self.config, self.lora)
        self.reader = sharded.Reader(folder)
        self.reader.require({name: parameter.shape for name, parameter in self.parameters.items()})
        for name in self.reader.shapes:
            if name not in self.parameters and not name.startswith("optimizer."):
                raise ValueError(f"{folder} holds {name}, which is of no adapter that its state.json names")

    def read(self, name: str, expert: int | None = None) -> Tensor:
        """A matrix: A [r, in] or B [out, r], of one routed expert where each has its own."""
        shape = self.parameters[name].shape
        if expert is None:
            return self.reader.tensor(name, (0, 0), shape, torch.float32)
        return self.reader.tensor(name, (expert, 0, 0), (1, *shape[1:]), torch.float32)[0]

    def adapts(self, weight: Parameter) -> bool:
        return any(f"{prefix}lora_A" in self.parameters for prefix in weight.adapter_prefixes)

    def add_to(self, rows: Tensor, weight: Parameter, first_row: int, expert: int | None = None) -> None:
        """Adds what the adapters do, scale * B A, to rows [n, in] of a weight, fp32, in place.

        Args:
            first_row: of the weight, or of one of its experts; gate and up have an adapter each.
        """
        _, scale = self.lora.rank_and_scale(expert is not None)
        height = weight.shape[-2] // len(weight.adapter_prefixes)
        for number, prefix in enumerate(weight.adapter_prefixes):
            low, high = max(first_row, number * height), min(first_row + len(rows), (number + 1) * height)
            if low < high and f"{prefix}lora_A" in self.parameters:
                first, second = (self.read(f"{prefix}{end}", expert) for end in ("lora_A", "lora_B"))
                added = second[low - number * height : high - number * height] @ first
                rows[low - first_row : high - first_row] += added * scale
