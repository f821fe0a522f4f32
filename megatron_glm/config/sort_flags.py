"""Sorts a command line: flags of this program, of Megatron-LM and of other trainers, and those that nobody knows.

Nothing is guessed from the beginning of a name. What is so in every run here is accepted; everything else that is no
flag here is refused with the right name, with what the model has, or with the reason.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from . import megatron_flags, trainer_flags
from .megatron_flags import ANY, LAUNCHER, SERVED, SWITCHES, VALUES
from .model import ModelConfig

ACCEPTED, ALWAYS_SO = "accepted", "always so here, accepted"
WITH_MODEL = "compared with the model"  # once it is known
OTHER_NAME, FIXED, ABSENT_HERE, UNKNOWN = "another name here", "fixed by the model", "not here", "unknown"
REFUSED = (OTHER_NAME, FIXED, ABSENT_HERE, UNKNOWN)
FALSE = ("false", "False", "0")


def by_flag(*tables: dict[str, str]) -> dict[str, str]:
    """Flag -> what the tables say of it, from text -> names."""
    return {f"--{name}": text for table in tables for text, names in table.items() for name in names.split()}


ALWAYS: dict[str, tuple[str, ...]] = {f"--{name}": () for name in SWITCHES} | SERVED  # the values that are so
RENAMED = by_flag(megatron_flags.NAMES, trainer_flags.NAMES)
NOT_HERE = by_flag(megatron_flags.REASONS, trainer_flags.REASONS)
FAMILIES = {name[:-1]: text for name, text in NOT_HERE.items() if name.endswith("*")}

SECTION = re.compile(r"(training|optimizer|lr_scheduler|parallelism|checkpoint|metrics)\.")  # of torchtitan's flags


class Flag(NamedTuple):
    """A flag of the command line with what follows it up to the next one."""

    words: tuple[str, ...]  # as they were written

    @property
    def word(self) -> str:
        """The flag alone, without =VALUE."""
        return self.words[0].split("=", 1)[0]

    @property
    def values(self) -> tuple[str, ...]:
        return (*self.words[0].split("=", 1)[1:], *self.words[1:])

    @property
    def name(self) -> str:
        return "--" + SECTION.sub("", self.word[2:]).replace("_", "-").lower()

    def __str__(self) -> str:
        return " ".join((self.word, *self.values))


class Verdict(NamedTuple):
    """What becomes of a flag; `text` says why or what to write, and is empty where it is accepted."""

    flag: Flag
    kind: str
    text: str = ""


@dataclass(frozen=True)
class Known:
    """The flags of a script: name -> does a value follow; and those of its sister script, with that script's name."""

    takes_value: dict[str, bool]
    elsewhere: dict[str, str]


def split(words: Sequence[str]) -> tuple[list[str], list[Flag]]:
    """(the words before the first flag, the flags). A value may begin with one dash (-1), never with two."""
    first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    flags: list[Flag] = []
    for word in words[first:]:
        if word.startswith("--"):
            flags.append(Flag((word,)))
        else:
            flags[-1] = Flag((*flags[-1].words, word))
    return list(words[:first]), flags


def verdict(flag: Flag, known: Known) -> Verdict:
    """What becomes of one flag, before the model is known."""
    name, value = flag.name, flag.values[0] if flag.values else "N"
    if flag.word in known.takes_value:
        return _own(flag, known)
    if name in known.takes_value:
        own = _own(Flag((name, *flag.values)), known)
        text = own.text or str(own.flag)
        return Verdict(flag, OTHER_NAME if own.kind == ACCEPTED else own.kind, text)
    if name in known.elsewhere:
        return Verdict(flag, ABSENT_HERE, NOT_HERE.get(name, f"a flag of {known.elsewhere[name]}"))
    if name in ALWAYS:
        return _always(flag)
    if name in OF_MODEL:
        return Verdict(flag, WITH_MODEL)
    if (text := RENAMED.get(name)) is not None:
        if value in FALSE and "{}" not in text:
            return Verdict(flag, ABSENT_HERE, "leave it out")
        return Verdict(flag, OTHER_NAME, text.format(value))
    if (text := NOT_HERE.get(name)) is not None:
        return Verdict(flag, ABSENT_HERE, text)
    if name in LAUNCHER:
        return Verdict(flag, ABSENT_HERE, "a flag of torchrun, whose flags come before the name of the script")
    if near := nearest(name, known.takes_value):
        return Verdict(flag, UNKNOWN, f"did you mean {near}?")
    if family := max((prefix for prefix in FAMILIES if name.startswith(prefix)), key=len, default=None):
        return Verdict(flag, ABSENT_HERE, FAMILIES[family])
    return Verdict(flag, UNKNOWN)


def _own(flag: Flag, known: Known) -> Verdict:
    value = flag.values[0] if flag.values else ""
    if (text := VALUES.get(flag.word, {}).get(value)) is not None:
        return Verdict(flag, OTHER_NAME, text)
    if not known.takes_value[flag.word] and value in ("true", "True", "1"):
        return Verdict(flag, OTHER_NAME, f"{flag.word}, which takes no value")
    if not known.takes_value[flag.word] and value in FALSE:
        return Verdict(flag, ABSENT_HERE, "it takes no value: leave it out")
    return Verdict(flag, ACCEPTED)


def _always(flag: Flag) -> Verdict:
    served = ALWAYS[flag.name]
    if served == ():
        if flag.values in ((), ("true",), ("True",)):
            return Verdict(flag, ALWAYS_SO)
        return Verdict(flag, ABSENT_HERE, "it is so in every run and takes no value")
    if len(flag.values) == 1 and (served == ANY or any(_same(flag.values[0], each) for each in served)):
        return Verdict(flag, ALWAYS_SO)
    return Verdict(flag, ABSENT_HERE, "it takes one value" if served == ANY else f"always {' or '.join(served)} here")


def _same(value: str, served: str) -> bool:
    """Equal as words or as numbers: 0.0 and 0."""
    try:
        return float(value) == float(served)
    except ValueError:
        return value.lower() == served.lower()


def compare(flag: Flag, others: dict[str, Flag], model: ModelConfig) -> Verdict:
    """What becomes of a flag that the model fixes. `others`: all of the command line, some say a thing together."""
    value = flag.values[0] if len(flag.values) == 1 else ""
    same, has = OF_MODEL[flag.name](model, value, others)
    return Verdict(flag, ALWAYS_SO) if same else Verdict(flag, FIXED, f"the model has {has}")


# (model, value, all flags) -> (does the value say what the model has, what the model has)
Comparison = Callable[[ModelConfig, str, dict[str, Flag]], tuple[bool, str]]


def _number(what: str, of: Callable[[ModelConfig], float]) -> Comparison:
    return lambda model, value, others: (_same(value, str(of(model))), f"{what} {of(model)}")


def _head_size(model: ModelConfig, value: str, others: dict[str, Flag]) -> tuple[bool, str]:
    """Latent attention has several; Megatron reads none of them from --kv-channels."""
    names = ("qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim")
    sizes = {name: getattr(model, name) for name in names}
    return value in map(str, sizes.values()), ", ".join(f"{name} {size}" for name, size in sizes.items())


def _layer_pattern(model: ModelConfig, value: str, others: dict[str, Flag]) -> tuple[bool, str]:
    """--moe-layer-freq: a period, or a list of 0 (dense) and 1 (experts) as Python writes it: [0]*3+[1]*75."""
    types = [int(kind == "sparse") for kind in model.mlp_layer_types]
    has = "+".join(f"[{kind}]*{len(list(run))}" for kind, run in groupby(types))
    if value.isdecimal() and int(value):
        return types == [int(i % int(value) == 0) for i in range(len(types))], has
    parts = re.sub(r"[\s()]", "", value).split("+")
    matches = [re.fullmatch(r"\[([01](?:,[01])*),?\](?:\*(\d{1,5}))?", part) for part in parts]
    found = [match for match in matches if match]
    if len(found) < len(parts):
        return False, has
    return types == [int(c) for m in found for c in m[1].split(",") * int(m[2] or 1)], has


def _index_pattern(model: ModelConfig, value: str, others: dict[str, Flag]) -> tuple[bool, str]:
    """--dsa-indexer-topk-freq and --dsa-indexer-skip-topk-offset say together which layers score keys themselves."""
    has = "indexers in layers " + " ".join(str(i) for i in range(model.num_hidden_layers) if model.has_indexer(i))
    given = [others[name].values if name in others else (default,) for name, default in INDEX_PATTERN.items()]
    if not all(len(values) == 1 and values[0].isdecimal() for values in given):
        return False, has
    freq, offset = (int(values[0]) for values in given)
    full = [freq > 0 and max(i - offset + 1, 0) % freq == 0 for i in range(model.num_hidden_layers)]
    return full == [model.has_indexer(i) for i in range(model.num_hidden_layers)], has


INDEX_PATTERN = {"--dsa-indexer-topk-freq": "1", "--dsa-indexer-skip-topk-offset": "0"}  # with Megatron's defaults
OF_MODEL: dict[str, Comparison] = {
    "--kv-channels": _head_size,
    "--num-query-groups": _number("num_attention_heads", lambda m: m.num_attention_heads),
    "--moe-shared-expert-intermediate-size": _number(
        "shared experts of width", lambda m: m.n_shared_experts * m.moe_intermediate_size
    ),
    "--dsa-indexer-k-norm-epsilon": _number("indexer_norm_eps", lambda m: m.indexer_norm_eps),
    "--padded-vocab-size": _number("vocab_size", lambda m: m.vocab_size),
    "--moe-layer-freq": _layer_pattern,
    **dict.fromkeys(INDEX_PATTERN, _index_pattern),
}


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The one known flag that `name` is a misspelling of, or None where that is not sure.

    The dash-separated words must be the same but for a letter in one or two of them, or for where the dashes are, or
    one may be cut short. `--num-workers` is not `--num-layers`, and `--lora-rank` is not `--q-lora-rank`.
    """
    scored = [(errors, flag) for flag in known if (errors := _misspelled(name, flag)) is not None]
    best = min(scored, default=(0, None))[0]
    found = [flag for errors, flag in scored if errors == best]
    return found[0] if len(found) == 1 else None


def _misspelled(name: str, flag: str) -> int | None:
    """Wrong letters in `name` if it can be meant as `flag`, else None."""
    if not flag.startswith("--") or name == "--":
        return None
    if name.replace("-", "") == flag.replace("-", ""):
        return 0
    left, right = name[2:].split("-"), flag[2:].split("-")
    if len(left) != len(right):
        return None
    different = [(a, b) for a, b in zip(left, right, strict=True) if a != b]
    if len(different) == 1 and len(different[0][0]) > 2 and different[0][1].startswith(different[0][0]):
        return 1
    if len(different) > 2 or not all(min(len(a), len(b)) > 2 and _one_edit(a, b) for a, b in different):
        return None
    return len(different)


def _one_edit(a: str, b: str) -> bool:
    """One letter more, less or another, or two that changed places. A wrong digit makes another flag."""
    if re.sub(r"\D", "", a) != re.sub(r"\D", "", b):
        return False
    start = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    a, b = a[start:], b[start:]
    return a[1:] == b or a == b[1:] or a[1:] == b[1:] or (a[1::-1] == b[:2] and a[2:] == b[2:])


def message(verdicts: Sequence[Verdict]) -> str:
    """What is refused, in one line if that is one flag, else all flags sorted; empty where nothing is refused."""
    refused = [each for each in verdicts if each.kind in REFUSED]
    if not refused:
        return ""
    if len(refused) == 1:
        [(flag, kind, text)] = refused
        if kind == UNKNOWN:
            return f"unknown flag {flag.word}" + (f"; {text}" if text else "")
        return f"{flag}: {'here it is ' * (kind == OTHER_NAME)}{text}"
    lines = [f"{len(refused)} of the {len(verdicts)} flags are refused; sorted, these are all:"]
    for kind in (ACCEPTED, ALWAYS_SO, WITH_MODEL):
        if names := list(dict.fromkeys(each.flag.word for each in verdicts if each.kind == kind)):
            lines += textwrap.wrap(
                f"{kind}: {' '.join(names)}", 120, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
            )
    for kind in REFUSED:
        found = [each for each in refused if each.kind == kind]
        lines += [f"  {kind}:"] if found else []
        lines += [f"    {flag}: {text}" if text else f"    {flag.word}" for flag, _, text in found]
    return "\n".join(lines)
