"""Flags of the programs that run a model forwards only, tools/generate.py and tools/score.py, and their run."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from . import CheckpointConfig, DataConfig, KernelConfig, LoraConfig, ParallelConfig, RunConfig, TrainConfig
from .flags import Parser, add_flag, resolve
from .section import Section, flag_name, option

# The flags of a training run that these programs have, too, by section.
FLAGS: dict[type[Section], Sequence[str]] = {
    CheckpointConfig: ("load", "load_hf", "ckpt_step"),
    LoraConfig: ("base", "base_precision"),
    TrainConfig: ("bf16",),
    DataConfig: ("tokenizer_model", "ignore_keys", "special_tokens_in_text"),
    ParallelConfig: (
        "tensor_model_parallel_size",
        "sequence_parallel",
        "pipeline_model_parallel_size",
        "num_layers_per_virtual_pipeline_stage",
        "pipeline_model_parallel_layout",
        "microbatch_group_size_per_vp_stage",
        "context_parallel_size",
        "expert_model_parallel_size",
        "moe_token_dispatcher_type",
        "expert_node_size",
        "reshard_after_forward",
        "reshard_experts_after_forward",
        "distributed_timeout_minutes",
    ),
    KernelConfig: ("attention_backend", "attention", "dense_rows", "deterministic", "loss_chunk_size"),
}


@dataclass(frozen=True)
class GenerationConfig(Section):
    prompt_file: str | None = option(None, "rows with messages, prompt or input_ids, in JSON lines or Parquet")
    max_new_tokens: int = option(32, "tokens after which a completion ends, if no end token comes before")


@dataclass(frozen=True)
class ScoreConfig(Section):
    token_logprobs: bool = option(False, "the log-probability of each token, too")


def build_parser(description: str | None, usage: str, more: Mapping[type[Section], Sequence[str]] = {}) -> Parser:
    """The parser of these flags and of `more` fields of sections; only flags that were given appear in its result."""
    parser = Parser(
        usage=usage,
        description=description,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=44, width=120),
    )
    for source in (more, FLAGS):
        for section, names in source.items():
            hints = typing.get_type_hints(section)
            for field in dataclasses.fields(section):
                if field.name in names:
                    add_flag(parser, flag_name(field.name), field, hints[field.name])
    return parser


def forward_run(flags: argparse.Namespace) -> RunConfig:
    """The configuration that these flags name: nothing is trained, and packs have the default length.

    Raises: ValueError if the flags name no weights, or some that cannot be served.
    """
    if "load" not in flags and "load_hf" not in flags:
        raise ValueError("give --load CHECKPOINT or --load-hf FOLDER: the weights")
    config = resolve(flags)
    return dataclasses.replace(config, train=dataclasses.replace(config.train, eval_only=True))


def with_packs(config: RunConfig, data_path: Sequence[str], lengths: Sequence[int], ranks: int) -> RunConfig:
    """The same run with packs for documents of these lengths: each holds the longest, or some that are shorter.

    Args:
        ranks: of the whole run.
    Raises: ValueError if the ranks do not fit the layout.
    """
    parallel, most = config.parallel, config.model.max_position_embeddings
    dp = parallel.data_parallel_size(ranks)
    stripes = 2 * parallel.context_parallel_size * parallel.tensor_model_parallel_size
    length = max(max(lengths), min(-(-sum(lengths) // dp), DataConfig.seq_length, most // stripes * stripes), 2)
    length = -(-length // stripes) * stripes
    data = dataclasses.replace(config.data, data_path=tuple(data_path), seq_length=length)
    return dataclasses.replace(config, data=data, train=dataclasses.replace(config.train, global_batch_size=dp))
