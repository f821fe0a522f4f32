"""What the names of keys mean: switches of the loss, metadata, and names that must not be passed over."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

# 0 or false: no loss on this message, or row. OpenAI and others write weight; axolotl train or training; ms-swift loss
# and loss_scale; verl loss_mask. torchtune's masked is the other way round.
SWITCHES = frozenset("weight loss_weight loss loss_scale loss_mask train training trainable learn".split())
INVERTED_SWITCHES = frozenset({"masked"})

# A column that is not read, and has one of these words in its name, would change what is trained: it is refused.
_WORDS = frozenset(
    "mask masks masked loss losses weight weights label labels target targets train training trainable trained system"
    " tool tools function functions position positions attention seq seqs segment segments cu seqlen seqlens documents"
    " history template kwargs thinking reasoning thought thoughts cot image images pixel video videos audio audios"
    " learn supervised".split()
)
_JOINED = re.compile(
    "promptlen|sourcelen|answerstart|lossmask|lossweight|attentionmask|positionid|seqlen|seqstart|documentid|docids|sampleweight"
)
# metadata all the same
HARMLESS = frozenset(
    "target_language max_seqlen special_tokens_mask parallel_tool_calls tool_choice activity_label".split()
)


def is_switch(key: str) -> bool:
    return key in SWITCHES or key in INVERTED_SWITCHES


def switched_on(key: str, value: Any, where: str) -> bool:
    """Whether a switch wants loss. Raises ValueError for what is neither on nor off, as 0.5."""
    if not isinstance(value, int | float) or value not in (0, 1):
        raise ValueError(
            f"{where} is {value!r:.80}, and only 0, 1, false and true can be honoured; name it in --ignore-keys if it "
            "is only metadata"
        )
    return bool(value) != (key in INVERTED_SWITCHES)


@lru_cache(maxsize=4096)
def changes_training(name: str) -> bool:
    """Does the name of an unknown column suggest masks, weights, positions, a system text, tools …?"""
    words = re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
    if words in HARMLESS:
        return False
    return not _WORDS.isdisjoint(re.split("[^a-z]+", words)) or bool(_JOINED.search(re.sub("[^a-z]", "", words)))


@dataclass
class Notes:
    """What one row leaves to say, beside its tokens."""

    ignored: frozenset[str] = frozenset()  # --ignore-keys
    unused: set[str] = field(default_factory=set)
    warnings: set[str] = field(default_factory=set)

    def without_ignored(self, fields: dict, needed: Iterable[str] = ()) -> dict:
        """The fields that are not null and not metadata; `needed` ones are never metadata.

        An object of nothing but nulls is null: Arrow may write {"name": null, "arguments": null} so.
        """
        ignored = self.ignored.difference(needed)
        self.unused |= ignored & fields.keys()
        return {
            key: value
            for key, value in fields.items()
            if value is not None and key not in ignored and (key in needed or not _only_nulls(value))
        }

    def columns_not_used(self, row: dict, used: Iterable[str]) -> None:
        """Notes the columns of a row that were not read; refuses those that would change what is trained."""
        for key in row.keys() - used:
            self._refuse_inside({key: row[key]}, "")
            self.unused.add(key)

    def _refuse_inside(self, fields: dict, where: str) -> None:
        for key, value in fields.items():
            if value is None or key in self.ignored or (isinstance(value, str | list | dict) and not value):
                continue
            if changes_training(key):
                raise ValueError(
                    f"the row has the key {where}{key} = {value!r:.60}, which is not read; name it in --ignore-keys if "
                    "it is only metadata"
                )
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, dict):
                    self._refuse_inside(item, f"{where}{key}.")

    def refuse_unknown(self, fields: dict, where: str) -> None:
        """Refuses keys inside a message that nothing reads; empty ones (annotations: []) say nothing and are noted."""
        for key, value in fields.items():
            if isinstance(value, str | list | dict) and not value:
                self.unused.add(key)
                continue
            raise ValueError(
                f"{where} has the unknown key {key!r} ({value!r:.60}); name it in --ignore-keys if it is only metadata"
            )


def _only_nulls(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(item is None for item in value.values())
