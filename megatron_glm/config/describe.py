"""A configuration as text: what was given and what decides most, or all of it."""

from __future__ import annotations

import dataclasses
import shlex
from typing import Any

from .model import ModelConfig
from .run import RunConfig
from .section import flag_name

# Shown even where they have their default
ESSENTIAL = {"micro_batch_size", "global_batch_size", "seq_length", "lr", "lr_decay_style", "attention_backend"}
WIDTH = 120


def describe(config: RunConfig, verbose: bool) -> str:
    """The resolved configuration: every value on a line of its own, or a line or two a section of what matters."""
    return _everything(config) if verbose else _summary(config)


def _everything(config: RunConfig) -> str:
    lines = []
    for section in dataclasses.fields(config):
        value = getattr(config, section.name)
        if dataclasses.is_dataclass(value):
            lines.append(f"{section.name}:")
            lines += [f"  {field.name} = {getattr(value, field.name)}" for field in dataclasses.fields(value)]
        else:
            lines.append(f"{section.name} = {value}")
    return "\n".join(lines)


def _summary(config: RunConfig) -> str:
    """The model in words, then the flags that differ from their defaults; they can be copied into a command."""
    lines = ["configuration (--verbose: all of it):", f"  {'model':12}{_model(config.model)}"]
    for section in dataclasses.fields(config):
        value = getattr(config, section.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, ModelConfig):
            fields = [field for field in dataclasses.fields(value) if _matters(field, getattr(value, field.name))]
            lines += _wrapped(section.name, [_flag(field.name, getattr(value, field.name)) for field in fields])
    return "\n".join(lines)


def _model(model: ModelConfig) -> str:
    experts = f"{model.n_routed_experts} experts, {model.num_experts_per_tok} a token"
    return (
        f"{model.num_hidden_layers} layers, hidden size {model.hidden_size}, {model.num_attention_heads} heads, "
        f"{experts}, vocabulary {model.vocab_size}"
    )


def _matters(field: dataclasses.Field, value: Any) -> bool:
    return value is not None and (value != field.default or field.name in ESSENTIAL)


def _flag(name: str, value: Any) -> str:
    if value is True:
        return flag_name(name)
    values = value if isinstance(value, tuple) else [str(value).lower() if value is False else value]
    return f"{flag_name(name)} {shlex.join(map(str, values))}"


def _wrapped(title: str, flags: list[str]) -> list[str]:
    """The flags in lines of WIDTH, the first of which has the title."""
    lines: list[str] = []
    for flag in flags:
        if lines and len(lines[-1]) + 1 + len(flag) <= WIDTH:
            lines[-1] += f" {flag}"
        else:
            lines.append(f"  {title if not lines else '':12}{flag}")
    return lines
