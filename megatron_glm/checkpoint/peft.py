"""Adapters as a folder of Hugging Face's PEFT, which inference engines load: written and read.

`adapter_model.safetensors` holds A [r, in] and B [out, r] of every weight, of a routed expert under its own key. Its
rank and scale are the same everywhere: SGLang reads one `r` and one `lora_alpha`, no patterns and no rsLoRA. Where the
experts' rank is another, the smaller one is filled up with zeros, and B takes the difference of the scales.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config.parameters import Parameter
from ..config.source import require_outside
from .adapters import SETTINGS, AdapterCheckpoint
from .convert import verify_weights, weights_file
from .files import write_durably
from .output import OutputFile, Run, identity, produce
from .safetensors_io import Outgoing

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model.model."
PEFT_VERSION = "0.21.2"  # whose reading of this form is tested
METADATA = "megatron_glm"  # in the header of the weights: our settings, which PEFT's cannot say


class PeftExport:
    """Adapters about to become a PEFT folder, in the dtype of the model's config.

    base: what adapter_config.json calls the model; None where it is no Hugging Face folder.
    """

    def __init__(self, adapters: AdapterCheckpoint, base: Path | None) -> None:
        self.adapters, self.base = adapters, base
        settings = [self._rank_and_scale(parameter) for parameter in adapters.parameters.values()]
        self.rank, self.scale = max(rank for rank, _ in settings), settings[0][1]

    def config(self) -> dict[str, Any]:
        """adapter_config.json."""
        alpha = round(self.scale * self.rank, 9)  # without the last bits of a quotient
        targets = {key.rsplit(".", 3)[1] for p in self.adapters.parameters.values() for key in keys_of(p)[:1]}
        return {
            "base_model_name_or_path": None if self.base is None else str(self.base),
            "bias": "none",
            "inference_mode": True,
            "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
            "lora_dropout": 0.0,
            "peft_type": "LORA",
            "peft_version": PEFT_VERSION,
            "r": self.rank,
            "target_modules": sorted(targets),
            "task_type": "CAUSAL_LM",
        }

    def warnings(self) -> list[str]:
        """What a reader of the folder leaves out or refuses."""
        targets = set(self.adapters.lora.lora_target_modules)
        found = []
        if outside := [name for name in ("gate_proj", "up_proj", "down_proj") if name in targets]:
            found.append(
                f"PEFT {PEFT_VERSION} takes {', '.join(outside)} as the routed experts' alone and leaves out the dense "
                "MLPs and shared experts (its issue 3711); vLLM and SGLang read them"
            )
        if "kv_b_proj" in targets:
            found.append("vLLM multiplies kv_b_proj's weight into others and leaves its adapter out: --merge for it")
        for pair in (("q_a_proj", "kv_a_proj_with_mqa"), ("gate_proj", "up_proj")):
            if len(targets & set(pair)) == 1:
                found.append(f"SGLang stacks {' and '.join(pair)} and needs adapters of both or of neither")
        return found

    def files(self, run: Run) -> list[OutputFile]:
        """What `write` writes, adapter_config.json aside."""
        settings = {name: value for name, value in asdict(self.adapters.lora).items() if name in SETTINGS}
        tensors = [tensor for p in self.adapters.parameters.values() for tensor in self._outgoing(p)]
        return [weights_file(WEIGHTS, tensors, run, {METADATA: json.dumps(settings)})]

    def write(self, target: Path, run: Run) -> None:
        """Writes the folder `target`; nothing half-written gets its name."""
        require_outside("--to-peft", target, self.adapters.base.folder if self.base is None else self.base)
        reader = self.adapters.reader
        if run.verify:
            verify_weights(reader, run)
        settings = {"source": str(reader.folder.resolve())} | identity([*reader.folder.glob("*.distcp")])
        content = (json.dumps(self.config(), indent=2) + "\n").encode()
        produce(target, settings, self.files(run), run, lambda staging, _: write_durably(staging / CONFIG, content))

    def _rank_and_scale(self, parameter: Parameter) -> tuple[int, float]:
        return self.adapters.lora.rank_and_scale(len(parameter.shape) == 3)

    def _outgoing(self, parameter: Parameter) -> Iterator[Outgoing]:
        dtype = getattr(torch, self.adapters.config.dtype)
        rows, columns = parameter.shape[-2:]
        shape = (self.rank, columns) if parameter.kind == "lora_A" else (rows, self.rank)
        for number, key in enumerate(keys_of(parameter)):
            expert = number if len(parameter.shape) == 3 else None
            yield Outgoing(key, dtype, shape, partial(self._block, parameter, expert, dtype, shape))

    def _block(
        self, parameter: Parameter, expert: int | None, dtype: torch.dtype, shape: tuple[int, int]
    ) -> Iterator[Tensor]:
        matrix, result = self.adapters.read(parameter.name, expert), torch.zeros(shape)
        factor = 1.0 if parameter.kind == "lora_A" else self._rank_and_scale(parameter)[1] / self.scale
        result[: matrix.shape[0], : matrix.shape[1]] = matrix * factor
        yield result.to(dtype)


def keys_of(parameter: Parameter) -> list[str]:
    """The PEFT keys of an adapter's matrix, one an expert where each has its own.

    "layers.3.mlp.experts.gate_lora_A" -> "….layers.3.mlp.experts.0.gate_proj.lora_A.weight", ….
    """
    owner, end = parameter.name[: -len(parameter.kind)], parameter.kind
    if len(parameter.shape) == 2:
        return [f"{PREFIX}{owner}{end}.weight"]
    folder, _, matrix = owner.removesuffix("_").rpartition(".")
    return [f"{PREFIX}{folder}.{e}.{matrix}_proj.{end}.weight" for e in range(parameter.shape[0])]
