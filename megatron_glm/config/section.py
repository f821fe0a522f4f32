"""What the sections of a configuration have in common: a field is a flag, its type and metadata are its check."""

from __future__ import annotations

import dataclasses
import math
import typing
from functools import cache
from typing import Any, Literal


def option(default: Any, help: str, minimum: int | None = None) -> Any:
    """A dataclass field with a default, the help text of its flag and a number's lowest value.

    Without `minimum` that is 1 for an integer, and a float has none.
    """
    return dataclasses.field(default=default, metadata={"help": help, "minimum": minimum})


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def choices_of(kind: Any) -> tuple[Any, ...]:
    """The values of a `Literal` type, which may be optional; () of any other type."""
    return next(
        (typing.get_args(arg) for arg in (kind, *typing.get_args(kind)) if typing.get_origin(arg) is Literal), ()
    )


def require_multiple(what: str, number: int, of: str, divisor: int) -> None:
    """Raises ValueError unless `divisor` divides `number`; both come with the words that the user knows them by."""
    if number % divisor:
        raise ValueError(f"{what} ({number}) must be a multiple of {of} ({divisor})")


@cache
def type_hints(section: type) -> dict[str, Any]:
    """Of its fields. A search of layouts makes thousands of sections."""
    return typing.get_type_hints(section)


@dataclasses.dataclass(frozen=True)
class Section:
    """Base of the sections: refuses a value outside its choices or below its minimum, and infinite numbers."""

    def __post_init__(self) -> None:
        hints = type_hints(type(self))
        for field in dataclasses.fields(self):
            value, kind, minimum = getattr(self, field.name), hints[field.name], field.metadata["minimum"]
            if value is None:
                continue
            flag = flag_name(field.name)
            if (choices := choices_of(kind)) and value not in choices:
                raise ValueError(f"{flag} is {value!r}; choose from {choices}")
            if kind in (int, int | None) and value < (lowest := 1 if minimum is None else minimum):
                raise ValueError(f"{flag} is {value}; it must be at least {lowest}")
            if kind in (float, float | None) and not math.isfinite(value):
                raise ValueError(f"{flag} is {value}; it must be a finite number")
            if kind in (float, float | None) and minimum == 0 and value < 0:
                raise ValueError(f"{flag} is {value}; it must not be negative")

    def require(self, needed: str, *names: str) -> None:
        """Refuses each of the fields `names` that is given (neither None nor False) where the field `needed` is not."""
        if not getattr(self, needed):
            for name in names:
                if (value := getattr(self, name)) is not None and value is not False:
                    given = f"{flag_name(name)}{'' if value is True else f' {value}'}"
                    raise ValueError(f"{given} needs {flag_name(needed)}")
