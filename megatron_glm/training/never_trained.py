"""Which parts of a model still have the random weights that they were drawn with: noted in every checkpoint."""

from __future__ import annotations

from megatron_glm.checkpoint import sharded
from megatron_glm.config import RunConfig, iterations
from megatron_glm.training.logging import log


def never_trained(config: RunConfig) -> frozenset[str]:
    """Of "trunk", "indexer", "mtp" and "mtp indexer" (`trained.part_of`), those never trained when this run starts.

    From scratch all; else what the checkpoint of --load says. Converted weights count as trained.
    """
    section, model = config.checkpoint, config.model
    if section.load is not None:
        folder = iterations.iteration_folder(*iterations.start(section.load, section.ckpt_step))
        return frozenset(sharded.state_of(folder).get("never_trained", ()))
    if section.load_hf is not None:
        return frozenset()
    parts = {"trunk", "indexer"}
    return frozenset(parts | {"mtp", "mtp indexer"} if model.mtp_layer_ids else parts)


def warn_of_untrained(config: RunConfig) -> None:
    """A line for each part whose random weights this run uses and does not train, and one for an MTP layer held.

    The MTP layer has an indexer of its own, which the sparse stage trains.
    """
    parts, taught = never_trained(config), config.taught_parts
    if "trunk" in parts - taught:
        log(
            "warning: the trunk was never trained, and this run holds its random weights: --load or --load-hf names a "
            "model that was"
        )
    if config.selects and "indexer" in parts:
        log(
            f"warning: the indexer was never trained: its random weights choose the keys of every row that sees more "
            f"than {config.model.index_topk}. Pre-train with --attention dense, then --indexer-training warmup, then "
            "sparse (docs/pretraining.md)"
        )
    if config.selects and "mtp" in config.trained_parts and "mtp indexer" in parts - taught:
        log(
            "warning: the MTP layer's own indexer was never trained: its random weights choose the keys of the layer's "
            f"rows that see more than {config.model.index_topk}. --indexer-training sparse trains it"
        )
    if config.model.mtp_layer_ids and "mtp" not in taught and not config.train.eval_only:
        state = "warning: the MTP layer was never trained, and" if "mtp" in parts else "the MTP layer stays as it is,"
        one = len(config.model.mtp_layer_ids) == 1  # several cannot be trained
        flag = "--mtp-loss-scaling-factor above 0" if config.losses.mtp_steps else "--mtp-num-steps 1"
        log(f"{state} this run does not train it" + (f": {flag} does" if "trunk" in taught and one else ""))
