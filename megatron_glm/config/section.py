"""What the sections of a configuration have in common: a field is a flag, its type and metadata are its check."""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Any, Literal


def option(default: Any, help: str, minimum: int = 1) -> Any:
    """A dataclass field with a default, the help text of its flag and, for an integer, its lowest value."""
    return dataclasses.field(default=default, metadata={"help": help, "minimum": minimum})


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def require_multiple(what: str, number: int, of: str, divisor: int) -> None:
    """Raises ValueError unless `divisor` divides `number`; both come with the words that the user knows them by."""
    if number % divisor:
        raise ValueError(f"{what} ({number}) must be a multiple of {of} ({divisor})")


@dataclasses.dataclass(frozen=True)
class Section:
    """Base of the sections: refuses a value outside its choices, sizes and counts below 1, and infinite numbers."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), hints[field.name]
            choices = [arg for arg in (kind, *typing.get_args(kind)) if typing.get_origin(arg) is Literal]
            if choices and value is not None and value not in typing.get_args(choices[0]):
                raise ValueError(f"{flag_name(field.name)} is {value!r}; choose from {typing.get_args(choices[0])}")
            minimum = field.metadata["minimum"]
            if kind in (int, int | None) and value is not None and value < minimum:
                raise ValueError(f"{flag_name(field.name)} is {value}; it must be at least {minimum}")
            if kind in (float, float | None) and value is not None and not math.isfinite(value):
                raise ValueError(f"{flag_name(field.name)} is {value}; it must be a finite number")
