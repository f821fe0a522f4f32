"""A PEFT folder becomes a checkpoint of adapters: iteration 0, from which training goes on.

Both forms of the routed experts are read: a key for each expert, and PEFT's own, in which `experts.base_layer` is
gate_up_proj and `experts` down_proj: A [E * r, in] goes expert by expert, in B [out, r * E] the experts are innermost.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ..config.lora import ADAPTABLE, GROUPED_MULTIPLE, LoraConfig
from ..config.model import ModelConfig
from ..config.parameters import Parameter, adapter_parameters
from ..config.source import read_json, require_folder
from .adapters import Base, adapter_state
from .chunks import Chunk, Piece
from .convert import NewCheckpoint
from .output import Run
from .peft import CONFIG, METADATA, WEIGHTS
from .safetensors_io import Entry, read_header, read_metadata

KEY = re.compile(r"(?:base_model\.model\.)?model\.(layers\.\d+\..+)\.(lora_[AB])(?:\.default)?\.weight")
ONE_EXPERT = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj")
ALL_EXPERTS = re.compile(r"(.+\.mlp\.experts)(?:\.base_layer)?")
# Settings of adapter_config.json that make another function of A and B, and the values that do not.
PLAIN = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "lora_bias": (False, None),
    "use_qalora": (False, None),
    "layer_replication": (None, []),
}
# Starts that change the model, too, so that A and B belong to another one than the released; PEFT's other ones do not.
CHANGES_MODEL = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class Half:
    """A or B of one matrix: its tensor's shape, how it is read, and the scale of the pair."""

    key: str
    shape: tuple[int, int]
    read: Callable[[], Tensor]
    scale: float


class PeftImport(NewCheckpoint):
    """A PEFT folder about to become `folder`/iter_0000000.

    Ranks and scales that differ within it become one rank for the experts and one for the others: zeros fill up, and B
    takes the difference of the scales.

    base: the model; None: what adapter_config.json names.
    Raises: ValueError naming a setting or tensor that is not served, is missing, or does not fit the model.
    """

    def __init__(self, source: Path, folder: Path, base: Path | None) -> None:
        require_folder(source)
        self.source, self.settings = source, read_json(source / CONFIG)
        self._check_settings()
        if base is None:
            if not isinstance(named := self.settings.get("base_model_name_or_path"), str):
                raise ValueError(f"{source / CONFIG} names no base model: give --base DIR")
            if not (base := Path(named)).is_dir():
                raise ValueError(f"{source / CONFIG}: the base model {named} is no folder here: give --base DIR")
        self.base = Base.of(base)
        config = ModelConfig.from_hf(self.base.folder)
        if (pickled := source / "adapter_model.bin").is_file() and not (source / WEIGHTS).exists():
            raise ValueError(
                f"{pickled} is a pickle, which is not read: let PEFT save the adapters again, as {WEIGHTS}"
            )
        self.entries = read_header(source / WEIGHTS)
        halves = self._halves(config)
        self.lora = self._lora(config, halves)
        parameters = adapter_parameters(config, self.lora)
        self._check_names(parameters, halves)
        chunks = [
            self._chunk(parameter, expert, halves)
            for parameter in parameters.values()
            for expert in (range(parameter.shape[0]) if len(parameter.shape) == 3 else [None])
        ]
        side_files = self.base.folder / "hf" if (self.base.folder / "hf").is_dir() else self.base.folder
        super().__init__(folder, chunks, config, side_files, adapter_state(self.lora, self.base))

    def write(self, run: Run) -> None:
        """Writes the checkpoint; nothing half-written gets its name."""
        self._produce([self.source / CONFIG, self.source / WEIGHTS], run)

    def _check_settings(self) -> None:
        file, settings = self.source / CONFIG, self.settings
        for name, values in PLAIN.items():
            if (value := settings.get(name, values[0])) not in values:
                raise ValueError(f"{file}: {name} is {value!r}, read is {values[0]!r}")
        start = settings.get("init_lora_weights", True)
        if isinstance(start, str) and start.startswith(CHANGES_MODEL):
            raise ValueError(f"{file}: init_lora_weights is {start!r}, which changes the model under the adapters, too")
        for name, by_module in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
            patterns = settings.get(by_module) or {}
            if not isinstance(patterns, dict):
                raise ValueError(f"{file}: {by_module} is {patterns!r}, it must be an object")
            for key, value in {name: settings.get(name), **patterns}.items():
                if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
                    raise ValueError(f"{file}: {key} is {value!r}, it must be a number above 0")
            for pattern in patterns:
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise ValueError(f"{file}: {by_module} {pattern!r} is no regular expression: {error}") from error

    def _halves(self, config: ModelConfig) -> dict[tuple[str, int | None], Half]:
        """What the file holds, by canonical name and expert. Raises ValueError naming a key that is none of ours."""
        halves: dict[tuple[str, int | None], Half] = {}
        for key, entry in self.entries.items():
            if (match := KEY.fullmatch(key)) is None:
                raise ValueError(f"{entry.file}: the tensor {key} is of no adapter of a linear layer")
            wide = entry.dtype.is_floating_point and entry.dtype.itemsize > 1
            if len(entry.shape) != 2 or 0 in entry.shape or not wide:
                raise ValueError(
                    f"{entry.file}: {key} is {entry.dtype} {list(entry.shape)}, adapters are matrices of float32, "
                    "bfloat16 or float16"
                )
            module, end = match.groups()
            if (one := ONE_EXPERT.fullmatch(module)) is not None:
                owner, expert, matrix = one.groups()
                found = {(f"{owner}.{matrix}_{end}", int(expert)): self._half(key, end, module)}
            elif (every := ALL_EXPERTS.fullmatch(module)) is not None:
                found = self._fused(config, key, every[1], end)
            else:
                found = {(f"{module}.{end}", None): self._half(key, end, module)}
            if twice := found.keys() & halves.keys():
                raise ValueError(f"{entry.file}: {key} and {halves[next(iter(twice))].key} are of the same weight")
            halves |= found
        return halves

    def _half(self, key: str, end: str, module: str) -> Half:
        entry = self.entries[key]
        rank = entry.shape[0 if end == "lora_A" else 1]
        return Half(key, (entry.shape[0], entry.shape[1]), entry.tensor, self._scale(key, module, rank))

    def _scale(self, key: str, module: str, rank: int) -> float:
        """Of a module's pair. Raises ValueError where the settings give it another rank than its tensor has."""
        if (told := self._setting("r", "rank_pattern", module)) != rank:
            raise ValueError(f"{self.source / CONFIG}: r is {told} for {module}, {key} has the rank {rank}")
        alpha = self._setting("lora_alpha", "alpha_pattern", module)
        return alpha / (math.sqrt(rank) if self.settings.get("use_rslora") else rank)

    def _setting(self, name: str, by_module: str, module: str) -> float:
        """What the first pattern that fits the module says, or the setting of all."""
        for pattern, value in (self.settings.get(by_module) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", f"model.{module}"):
                return value
        return self.settings[name]

    def _fused(self, config: ModelConfig, key: str, owner: str, end: str) -> dict[tuple[str, int | None], Half]:
        """A or B of all experts of a layer in PEFT's form: of gate_up_proj, or of down_proj."""
        entry, experts, hidden = self._entry(key), config.n_routed_experts, config.hidden_size
        first, width = self._entry(key.replace(end, "lora_A")), config.moe_intermediate_size
        both = ".experts.base_layer." in key if hidden == width else first.shape[1] == hidden
        sides = {"lora_A": hidden if both else width, "lora_B": 2 * width if both else hidden}
        flat, other = entry.shape if end == "lora_A" else entry.shape[::-1]
        if other != sides[end] or flat % experts:
            raise ValueError(
                f"{entry.file}: {key} is {list(entry.shape)}; one side must be {sides[end]}, the other a rank for each "
                f"of {experts} experts"
            )
        rank = flat // experts
        scale = self._scale(key, f"{owner}.{'gate_up' if both else 'down'}_proj", rank)
        parts = {"down": (slice(None), slice(None))}
        if both and self._is_split(key.replace(end, "lora_B"), experts, width):
            half = rank // 2
            parts = {"gate": (slice(half), slice(width)), "up": (slice(half, None), slice(width, None))}
        elif both:  # the two share A
            parts = {"gate": (slice(None), slice(width)), "up": (slice(None), slice(width, None))}
        found: dict[tuple[str, int | None], Half] = {}
        for matrix, (ranks, rows) in parts.items():
            size = len(range(rank)[ranks])
            shape = (size, other) if end == "lora_A" else (len(range(other)[rows]), size)
            for expert in range(experts):
                read = partial(_of_expert, entry, end, experts, expert, ranks, rows)
                found[f"{owner}.{matrix}_{end}", expert] = Half(key, shape, read, scale)
        return found

    def _entry(self, key: str) -> Entry:
        if key not in self.entries:
            raise ValueError(f"{self.source / WEIGHTS} lacks {key}")
        return self.entries[key]

    def _is_split(self, key: str, experts: int, width: int) -> bool:
        """Whether one half of the ranks is gate_proj's alone and the other up_proj's, as PEFT makes it of two."""
        entry = self._entry(key)
        if entry.shape[0] != 2 * width or entry.shape[1] % (2 * experts):
            return False
        second = entry.tensor().view(2, width, 2, -1)  # matrix, row, half of the ranks, rank and expert
        return not second[0, :, 1].any() and not second[1, :, 0].any()

    def _lora(self, config: ModelConfig, halves: dict[tuple[str, int | None], Half]) -> LoraConfig:
        """The settings: those that an export of ours has left in the file, or what its tensors say."""
        stored = read_metadata(self.source / WEIGHTS).get(METADATA)
        try:
            lora = self._settings_of(halves) if stored is None else _parsed(stored)
            lora.check(config)
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"{self.source / WEIGHTS}: {error}") from error
        return lora

    def _settings_of(self, halves: dict[tuple[str, int | None], Half]) -> LoraConfig:
        if not halves:
            raise ValueError("it holds no adapter")
        firsts = {place: half for place, half in halves.items() if place[0].endswith("lora_A")}
        ranks = [half.shape[0] for (_, expert), half in firsts.items() if expert is None]
        expert_ranks = [half.shape[0] for (_, expert), half in firsts.items() if expert is not None]
        expert_rank = -(-max(expert_ranks, default=0) // GROUPED_MULTIPLE) * GROUPED_MULTIPLE
        rank = max(ranks, default=expert_rank)
        found = {"experts" if expert is not None else name.split(".")[-2] for name, expert in halves}
        targets = [name for name in ADAPTABLE if name in found] + sorted(found - {*ADAPTABLE})
        scale = next(half.scale for (_, expert), half in halves.items() if (expert is None) == bool(ranks))
        return LoraConfig(
            lora_rank=rank,
            lora_alpha=scale * rank,
            lora_expert_rank=expert_rank if expert_ranks and expert_rank != rank else None,
            lora_target_modules=tuple(targets),
        )

    def _check_names(self, parameters: Mapping[str, Parameter], halves: dict[tuple[str, int | None], Half]) -> None:
        file = self.source / WEIGHTS
        wanted = {
            (name, expert): parameter
            for name, parameter in parameters.items()
            for expert in (range(parameter.shape[0]) if len(parameter.shape) == 3 else [None])
        }
        for place, half in halves.items():
            if place not in wanted:
                raise ValueError(f"{file}: {half.key} is of no weight of {self.base.folder}")
        for (name, expert), parameter in wanted.items():
            of = name if expert is None else f"{name} of expert {expert}"
            if (half := halves.get((name, expert))) is None:
                raise ValueError(f"{file} lacks {of}: weights of one name have adapters in every layer or in none")
            side = 1 if parameter.kind == "lora_A" else 0
            if half.shape[side] != parameter.shape[-2:][side]:
                raise ValueError(
                    f"{file}: {half.key} is {list(half.shape)}, the model in {self.base.folder} needs "
                    f"{parameter.shape[-2:][side]} for its dim {side}"
                )
            if parameter.kind == "lora_B":
                first = halves[name.removesuffix("lora_B") + "lora_A", expert]
                if first.shape[0] != half.shape[1]:
                    raise ValueError(f"{file}: {first.key} has rank {first.shape[0]}, {half.key} {half.shape[1]}")

    def _chunk(self, parameter: Parameter, expert: int | None, halves: dict[tuple[str, int | None], Half]) -> Chunk:
        half, shape = halves[parameter.name, expert], parameter.shape
        _, scale = self.lora.rank_and_scale(expert is not None)
        factor = half.scale / scale if parameter.kind == "lora_B" else 1.0
        offsets, sizes = ((0, 0), shape) if expert is None else ((expert, 0, 0), (1, *shape[1:]))
        piece = Piece(parameter.name, shape, torch.float32, offsets, sizes)
        return Chunk(piece, partial(self._filled, half, sizes, factor))

    def _filled(self, half: Half, sizes: tuple[int, ...], factor: float) -> Tensor:
        """A or B with the rank that it has here: zeros fill up, and zeros only are left out."""
        data, result = half.read().float(), torch.zeros(sizes[-2:])
        rows, columns = (min(a, b) for a, b in zip(data.shape, result.shape, strict=True))
        if data[rows:].any() or data[:, columns:].any():
            raise ValueError(f"{self.source / WEIGHTS}: {half.key} is not 0 beyond the rank that its header gives")
        result[:rows, :columns] = data[:rows, :columns] * factor
        return result.view(sizes)


def _of_expert(entry: Entry, end: str, experts: int, expert: int, ranks: slice, rows: slice) -> Tensor:
    """A [r, in] or B [out, r] of one expert and matrix, of a tensor in PEFT's form."""
    whole = entry.tensor()
    if end == "lora_A":
        return whole.view(experts, -1, whole.shape[1])[expert, ranks]
    return whole.view(whole.shape[0], -1, experts)[rows, ranks, expert]


def _parsed(text: str) -> LoraConfig:
    content = json.loads(text)
    return LoraConfig(**content | {"lora_target_modules": tuple(content["lora_target_modules"])})
