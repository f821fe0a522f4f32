"""Completes prompts greedily with a checkpoint, alone or under torchrun in any layout: a JSON line a prompt.

tokens are the new ones, text what they say (null without a tokenizer), log_probs those of the tokens. Each new token
takes a forward of all that is there: a check of what was trained, not a server.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout that is not installed, too

from megatron_glm import signals  # noqa: E402

if __name__ == "__main__":
    signals.install(signal.SIGINT)  # Ctrl-C: one line and exit code 130

from megatron_glm.config import RunConfig  # noqa: E402
from megatron_glm.config.flags import Parser, refuse  # noqa: E402
from megatron_glm.config.inference import GenerationConfig, build_parser, forward_run, with_packs  # noqa: E402
from megatron_glm.launch import is_first_rank, one_thread_on_a_cpu, ranks_from_slurm, run_program, say, world_size  # noqa: E402  # noqa: E402
from megatron_glm.parallel.pipeline.layout import check_run  # noqa: E402

if TYPE_CHECKING:
    from megatron_glm.data.prompts import Prompt
    from megatron_glm.parallel.groups import ParallelGroups

PROMPT_FLAGS = ("prompt_file", "max_new_tokens")
USAGE = "%(prog)s {--load DIR | --load-hf DIR} --prompt-file FILE [--max-new-tokens N] [flags]"


def parser() -> Parser:
    return build_parser(__doc__, USAGE, {GenerationConfig: PROMPT_FLAGS})


def main() -> int:
    ranks_from_slurm()
    flags = parser().parse_args()
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # what the run says of itself: standard output has results alone
        return run(flags, out)


def run(flags: argparse.Namespace, out: TextIO) -> int:
    one_thread_on_a_cpu()
    try:
        settings = GenerationConfig(**{name: vars(flags)[name] for name in PROMPT_FLAGS if name in flags})
        if settings.prompt_file is None:
            raise ValueError("give --prompt-file FILE: the prompts")
        config, ranks = forward_run(flags), world_size()
        from megatron_glm.data.prompts import PromptReader  # imports torch, and all behind it: a second or more
        from megatron_glm.data.rows import RowSettings

        reader = PromptReader(RowSettings.of(config))
        prompts = reader.read([settings.prompt_file], say)
        most = config.model.max_position_embeddings
        for prompt in prompts:
            if len(prompt.ids) + settings.max_new_tokens > most:
                raise ValueError(
                    f"{prompt.place}: its {len(prompt.ids)} tokens and --max-new-tokens {settings.max_new_tokens} "
                    f"exceed max_position_embeddings ({most})"
                )
        decode = reader.decoder(config.data.tokenizer_model is not None, say)
        lengths = [len(prompt.ids) + settings.max_new_tokens for prompt in prompts]
        config = with_packs(config, [settings.prompt_file], lengths, ranks)
        check_run(config, ranks)
    except ValueError as error:
        refuse(str(error))
    return complete(config, settings, prompts, decode, out)


def complete(
    config: RunConfig,
    settings: GenerationConfig,
    prompts: list[Prompt],
    decode: Callable[[list[int]], str] | None,
    out: TextIO,
) -> int:
    """Prints what the model adds to each prompt. Returns the exit code: 1 if the text of one is empty."""
    from megatron_glm.training.generation import end_tokens, generate
    from megatron_glm.training.run import forward_engine

    ends = end_tokens(config)
    engine = forward_engine(config, partial(same_prompts, prompts))
    completions = generate(engine, [prompt.ids for prompt in prompts], settings.max_new_tokens, ends)
    empty = []
    for prompt, found in zip(prompts, completions, strict=True):
        said = found.tokens[:-1] if found.tokens[-1] in ends else found.tokens
        text = None if decode is None else decode(said)
        empty += [prompt.place] * (text == "")
        if is_first_rank():
            line = {"tokens": found.tokens, "text": text, "log_probs": found.log_probs}
            print(json.dumps(line, ensure_ascii=False), file=out, flush=True)
    if empty:
        say(f"error: no text was generated for {empty[0]}" + f" and {len(empty) - 1} more" * (len(empty) > 1))
    return int(bool(empty))


def same_prompts(prompts: list[Prompt], config: RunConfig, groups: ParallelGroups) -> RunConfig:
    """The configuration as it is. Raises ValueError if the ranks have read other prompts."""
    from megatron_glm.training.agreement import require_same

    digest = hashlib.sha256(repr([prompt.ids.tolist() for prompt in prompts]).encode()).hexdigest()
    require_same(groups.checkpoint, {"the digest of the prompts": digest[:12]})
    return config


if __name__ == "__main__":
    run_program(main)
