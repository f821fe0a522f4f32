"""Command line -> `RunConfig`: every field of the config dataclasses is a flag, its help text the field's metadata."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import re
import sys
import time
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron_glm.launch import say, world_size

from . import DataConfig, ModelConfig, PretrainDataConfig, RunConfig, flag_name, sort_flags
from .iterations import iteration_folder, start
from .lora import NO_ADAPTERS, with_stored
from .model import SHAPE_FIELDS
from .plan_flags import PLAN_FLAGS, REHEARSAL_FLAGS, add_plan_flags
from .section import Section, choices_of
from .source import require_model, require_outside

DataSection = type[DataConfig] | type[PretrainDataConfig]

SECTIONS = {f.name: type(f.default) for f in dataclasses.fields(RunConfig) if isinstance(f.default, Section)}

# Megatron's name of a model field where it has one; the other fields keep their own.
MEGATRON_NAMES = {
    "num_hidden_layers": "--num-layers",
    "intermediate_size": "--ffn-hidden-size",
    "moe_intermediate_size": "--moe-ffn-hidden-size",
    "qk_nope_head_dim": "--qk-head-dim",
    "qk_rope_head_dim": "--qk-pos-emb-head-dim",
    "index_n_heads": "--dsa-indexer-n-heads",
    "index_head_dim": "--dsa-indexer-head-dim",
    "index_topk": "--dsa-indexer-topk",
    "n_routed_experts": "--num-experts",
    "num_experts_per_tok": "--moe-router-topk",
    "n_group": "--moe-router-num-groups",
    "topk_group": "--moe-router-group-topk",
    "routed_scaling_factor": "--moe-router-topk-scaling-factor",
    "rms_norm_eps": "--norm-epsilon",
    "rope_theta": "--rotary-base",
    "initializer_range": "--init-method-std",
    "num_nextn_predict_layers": "--mtp-num-layers",
}
HEAD_START = 10  # seconds: torchrun ends all ranks when one has left, and the first one has something to say
NO_SHAPE = "give --hf-config DIR or PRESET, --load or --load-hf: the model has no shape yet"
DOCUMENT_MASKS = {"--reset-attention-mask", "--reset-position-ids", "--eod-mask-loss"}  # Megatron's; always so here
OTHER_SCRIPT = {
    DataConfig: (PretrainDataConfig, "pretrain_glm.py"),
    PretrainDataConfig: (DataConfig, "finetune_glm.py"),
}
NOT_OVERRIDABLE = {
    "indexer_types",
    "mlp_layer_types",
    "latent_norm_eps",
    "indexer_norm_eps",
    "dtype",
    "pad_token_id",
    "eos_token_id",
}


def refuse(message: str) -> NoReturn:
    """Ends the process with `error: …` and exit code 2; under torchrun the first rank prints, the others wait."""
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {message}", file=sys.stderr)
    else:
        time.sleep(HEAD_START)
    sys.exit(2)


class Parser(argparse.ArgumentParser):
    """Answers every mistake with one line, `error: …`, and exit code 2; under torchrun the first rank prints it."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        refuse(message)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """argparse's, but no value is empty: as a path, `--save "$SAVE"` without the variable is the current folder."""
        words = list(sys.argv[1:] if args is None else args)
        for before, word in zip(["", *words], words, strict=False):
            if not word.strip() or re.fullmatch("--[^=]+=", word):
                self.error(f"the value of {word.rstrip('=').strip() or before} is empty")
        return super().parse_known_args(words, namespace)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        if self._subparsers is None:  # else a command has flags of its own
            # first, as argparse would name the required flags that a misspelled one leaves missing
            flags = [word for word in words if word.startswith("--") and word != "--"]
            self._refuse_unknown([word for word in flags if word.split("=")[0] not in self.takes_value])
        parsed, unknown = self.parse_known_args(words, namespace)
        self._refuse_unknown(unknown)
        return parsed

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        if not words:
            return
        word = words[0].split("=")[0]
        if not word.startswith("--"):
            self.error(f"unexpected argument {word}")
        near = sort_flags.nearest(word, self.takes_value)
        self.error(f"unknown flag {word}" + (f"; did you mean {near}?" if near else ""))

    @property
    def takes_value(self) -> dict[str, bool]:
        """Every flag, and whether a value follows it."""
        return {flag: action.nargs != 0 for action in self._actions for flag in action.option_strings}


class RunParser(Parser):
    """Of the training scripts: sorts all flags before it reads any, so that one message names all that is wrong.

    `always_so` of its result are the accepted flags of Megatron's that change nothing. A flag that the model fixes
    (--num-query-groups) is judged when all others are read, since they name the model.
    """

    def __init__(self, data: DataSection, **kwargs: Any) -> None:
        super().__init__(exit_on_error=False, **kwargs)
        other, script = OTHER_SCRIPT[data]
        self.elsewhere = {flag_name(field.name): script for field in dataclasses.fields(other)}

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        if {"-h", "--help"} & set(words):
            return super().parse_args(["--help"])
        leading, flags = sort_flags.split(words)
        known = sort_flags.Known(self.takes_value, self.elsewhere)
        verdicts = [sort_flags.verdict(flag, known) for flag in flags]
        given = {each.flag.name for each in verdicts}
        own = [each.flag.words for each in verdicts if each.kind == sort_flags.ACCEPTED]
        parsed, unread, error = argparse.Namespace(), [], ""
        try:
            parsed, unread = self.parse_known_args([*leading, *itertools.chain(*own)], namespace)
        except argparse.ArgumentError as caught:
            error = str(caught)
        if not error and any(each.kind == sort_flags.WITH_MODEL for each in verdicts):
            verdicts, error = _compare_with_model(verdicts, parsed)
        if text := sort_flags.message(verdicts):
            self.error(text + (f"\n  {error}" if error else ""))
        if error:
            self.error(error)
        if unread:
            file = unread[0].endswith((".yaml", ".yml", ".json", ".toml"))
            hint = "write --FLAG VALUE" if "=" in unread[0] else sort_flags.NOT_HERE["--config"] if file else ""
            self.error(f"unexpected argument {unread[0]}" + (f"; {hint}" if hint else ""))
        if "no_document_mask" in parsed and (masks := given & DOCUMENT_MASKS):
            self.error(f"{min(masks)} and --no-document-mask contradict each other: give one")
        parsed.always_so = [each.flag.word for each in verdicts if each.kind == sort_flags.ALWAYS_SO]
        return parsed


def _compare_with_model(
    verdicts: list[sort_flags.Verdict], flags: argparse.Namespace
) -> tuple[list[sort_flags.Verdict], str]:
    """(the verdicts with those of the flags that the model fixes, why the model is not known or nothing)."""
    try:
        model = shape_of(flags)
    except ValueError as error:
        return verdicts, str(error)
    given = {each.flag.name: each.flag for each in verdicts}
    return [
        sort_flags.compare(each.flag, given, model) if each.kind == sort_flags.WITH_MODEL else each for each in verdicts
    ], ""


def parse(
    arguments: Sequence[str] | None = None, description: str | None = None, data: DataSection = DataConfig
) -> RunConfig:
    """The checked configuration of this run; prints one line and exits with code 2 where the flags cannot be served."""
    return configured(build_parser(description, data).parse_args(arguments), data)


def configured(
    flags: argparse.Namespace,
    data: DataSection = DataConfig,
    check: Callable[[RunConfig, int], None] = RunConfig.check,
) -> RunConfig:
    """The checked configuration of these flags; prints one line and exits with code 2 where they cannot be served.

    No process group is made, and torch is not imported.

    Args:
        data: the kind of data that the script trains on.
        check: raises ValueError for a configuration that the ranks, as many as `world_size` says, cannot run.
    """
    try:
        ranks = world_size()
        if useless := [name for name in PLAN_FLAGS if name in flags]:
            mode = "--rehearse-rank" if useless[0] in REHEARSAL_FLAGS else "--dry-run or --rehearse-rank"
            raise ValueError(f"{flag_name(useless[0])} needs {mode}")
        config = resolve(flags, data)
        if "check_data" in flags:
            config.data.check()  # nothing else of the run needs to be decided yet
        else:
            check(config, ranks)
    except ValueError as error:
        refuse(str(error))
    print_always_so(flags)
    return config


def print_always_so(flags: argparse.Namespace) -> None:
    """One line, from the first rank, that names the accepted flags of Megatron's which change nothing."""
    if flags.always_so:
        say(f"{sort_flags.ALWAYS_SO}: {' '.join(dict.fromkeys(flags.always_so))}")


def build_parser(description: str | None = None, data: DataSection = DataConfig) -> RunParser:
    """The parser of all sections; only flags that were given appear in its result."""
    parser = RunParser(
        data,
        usage="%(prog)s {--load DIR | --hf-config DIR|PRESET} --data-path PATH … [flags]",
        description=description,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=44, width=120),
    )
    for name, section in (SECTIONS | {"data": data}).items():
        group = parser.add_argument_group(name)
        hints = typing.get_type_hints(section)
        for field in dataclasses.fields(section):
            add_flag(group, flag_name(field.name), field, hints[field.name])
    group = parser.add_argument_group("model", "the shape comes from --hf-config, else from --load or --load-hf")
    group.add_argument("--hf-config", metavar="DIR|PRESET", help="folder with a config.json, or glm5, glm5.1, glm5.2 …")
    hints = typing.get_type_hints(ModelConfig)
    for field in dataclasses.fields(ModelConfig):
        if field.name not in NOT_OVERRIDABLE:
            flag = MEGATRON_NAMES.get(field.name, flag_name(field.name))
            kind = _boolean if hints[field.name] is bool else hints[field.name]
            group.add_argument(
                flag, dest=field.name, type=kind, metavar=_metavar(hints[field.name]), help=f"overrides {field.name}"
            )
    add_plan_flags(parser)
    return parser


def resolve(flags: argparse.Namespace, data: DataSection = DataConfig) -> RunConfig:
    """Sections and model shape of the given flags, not yet checked against each other."""
    given = vars(flags)
    sections: dict[str, Any] = {
        name: section(**{f.name: given[f.name] for f in dataclasses.fields(section) if f.name in given})
        for name, section in (SECTIONS | {"data": data}).items()
    }
    load, source = sections["checkpoint"].load, given.get("hf_config")
    checkpoint = None if load is None else iteration_folder(*start(load, sections["checkpoint"].ckpt_step))
    if checkpoint is not None:
        sections["lora"] = with_stored({name: given[name] for name in vars(NO_ADAPTERS) if name in given}, checkpoint)
    weights = sections["checkpoint"].load_hf
    if weights is not None:
        require_model("--load-hf", weights)
    if source is None and checkpoint is None and weights is None:
        raise ValueError(NO_SHAPE)
    overrides = _overrides(flags)
    for flag, folder in (("--load", checkpoint), ("--load-hf", weights)):
        if folder is not None:
            _require_shape_of_weights(flag, Path(folder), overrides)
        if source is not None and folder is not None:
            _require_same_model(source, flag, Path(folder), overrides)
    model = ModelConfig.from_hf(source or weights or checkpoint or "", **overrides)
    candidates = [Path(folder) for folder in (weights, source) if folder]
    candidates += [checkpoint / "hf"] if checkpoint else []
    hf_folder = next((str(folder) for folder in candidates if folder.is_dir()), None)
    if hf_folder is not None and sections["checkpoint"].save is not None:
        require_outside("--save", Path(sections["checkpoint"].save), Path(hf_folder))
    if sections["losses"].mtp_num_steps is None:  # a model for fine-tuning has an MTP layer that is trained already
        pretrains = isinstance(sections["data"], PretrainDataConfig)
        # which train nothing else
        alone = sections["indexer"].indexer_training == "warmup" or sections["lora"].lora_rank > 0
        steps = int(pretrains and not alone and model.num_nextn_predict_layers == 1)
        sections["losses"] = dataclasses.replace(sections["losses"], mtp_num_steps=steps)
    return RunConfig(model=model, hf_folder=hf_folder, **sections)


def shape_of(flags: argparse.Namespace) -> ModelConfig:
    """The model that these flags name. Raises ValueError if they name none, or one that cannot be served."""
    source = getattr(flags, "hf_config", None) or getattr(flags, "load_hf", None)
    if source is None and "load" in flags:
        source = iteration_folder(*start(flags.load, getattr(flags, "ckpt_step", None)))
    if source is None:
        raise ValueError(NO_SHAPE)
    return ModelConfig.from_hf(source, **_overrides(flags))


def _overrides(flags: argparse.Namespace) -> dict[str, Any]:
    """Fields of the model that have flags of their own, by name."""
    return {field.name: getattr(flags, field.name) for field in dataclasses.fields(ModelConfig) if field.name in flags}


def _require_shape_of_weights(flag: str, folder: Path, overrides: dict[str, Any]) -> None:
    """Refuses a flag that gives the model another shape than the weights have which it is to start from."""
    changed = [name for name in SHAPE_FIELDS if name in overrides]
    stored = ModelConfig.from_hf(folder) if changed else None
    for name in changed:
        if (theirs := getattr(stored, name)) != overrides[name]:
            given = f"{MEGATRON_NAMES.get(name, flag_name(name))} {overrides[name]}"
            what = f"{theirs}-layer checkpoint" if name == "num_hidden_layers" else f"checkpoint of {name} {theirs}"
            raise ValueError(f"{given} with a {what} ({flag} {folder}): leave the flag out")
    wanted = overrides.get("num_nextn_predict_layers", 0)
    if wanted and wanted > (there := ModelConfig.from_hf(folder).num_nextn_predict_layers):
        what = f"checkpoint of {there} MTP layers ({flag} {folder})"
        raise ValueError(f"--mtp-num-layers {wanted} with a {what}: give at most {there}")


def _require_same_model(source: str, flag: str, checkpoint: Path, overrides: dict[str, Any]) -> None:
    """Refuses a checkpoint of another model than --hf-config says: the shapes alone do not tell GLM-5 from GLM-5.2.

    Fields that a flag overrides may differ, and those that do not enter the forward.
    """
    if not (checkpoint / "config.json").is_file():
        return  # no complete checkpoint, as loading it will say
    free = {"dtype", "pad_token_id", "eos_token_id", "initializer_range", "max_position_embeddings", *overrides}
    free |= {"indexer_types", "mlp_layer_types"} if "num_hidden_layers" in overrides else set()
    wanted, stored = ModelConfig.from_hf(source), ModelConfig.from_hf(checkpoint)
    for field in dataclasses.fields(ModelConfig):
        ours, theirs = getattr(wanted, field.name), getattr(stored, field.name)
        if field.name not in free and ours != theirs:
            raise ValueError(
                f"{flag} {checkpoint} is of another model: its {field.name} is {theirs}, that of --hf-config {source} "
                f"is {ours}; load the right one, or leave --hf-config out"
            )


def add_flag(group: Any, flag: str, field: dataclasses.Field, hint: Any) -> None:
    """One flag of a section; its type says how it is read, and a default that means something is shown."""
    default, text = field.default, field.metadata["help"]
    if default is not None and default is not False and default != ():
        text += f" (default: {'true' if default is True else default})"
    if hint is bool and not default:
        group.add_argument(flag, action="store_true", help=text)
    elif hint is bool:
        group.add_argument(flag, type=_boolean, metavar="{true,false}", help=text)
    elif choices := choices_of(hint):
        group.add_argument(flag, choices=choices, help=text)
    elif typing.get_origin(hint) is tuple:
        kind = typing.get_args(hint)[0]
        group.add_argument(flag, nargs="+", action=_Tuple, type=kind, metavar=_metavar(kind, "PATH"), help=text)
    else:
        kind = next(kind for kind in (int, float, str) if kind in (hint, *typing.get_args(hint)))
        group.add_argument(flag, type=kind, metavar=_metavar(kind), help=text)


class _Tuple(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, tuple(values))


def _boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text == "true"


def _metavar(kind: type, text: str = "STR") -> str:
    return {int: "N", float: "X", str: text, bool: "{true,false}"}[kind]
