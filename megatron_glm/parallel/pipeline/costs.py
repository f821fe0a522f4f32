"""What layers, head and MTP steps take, in operations of a large matrix product: measured rates of each kind."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from megatron_glm.config import LossConfig, ModelConfig, ParallelConfig
from megatron_glm.config.flops import LayerFlops, head_flops, layer_flops, mtp_step_flops

Cost = tuple[float, ...]  # forward, backward; maybe the gradients of weights, which the backward has put off


class Rates(NamedTuple):
    """Time of an operation of each kind, forward and backward, where one in a large matrix product takes 1.

    The backward is counted in operations of the forward, so that a product takes 2. The products and the experts carry
    the norms, additions and movements around them.
    """

    products: Cost
    experts: Cost
    attention: Cost
    index_scores: Cost
    index_projections: Cost
    head: Cost


# An H200, bf16, the cudnn backend, documents of 4,096 tokens and more (docs/performance.md). The head makes the
# gradient of its loss together with the loss.
MEASURED = Rates((1.15, 2.3), (1.3, 2.6), (2.3, 9.9), (2, 0), (1, 0), (3.1, 0))
# Share of what "full" computes again. Selective at 32,768 tokens was measured to take so much longer than its kernels.
REPEATED = {"none": 0.0, "selective": 0.12, "full": 1.0}


@lru_cache
def part_costs(
    model: ModelConfig, seq_length: int, parallel: ParallelConfig, rates: Rates, losses: LossConfig
) -> tuple[list[Cost], Cost, Cost]:
    """Costs of each layer, of all MTP steps without their heads, and of the head in all its predictions."""
    kinds = 3 if parallel.defers_weights else 2
    layers = [layer_flops(model, layer, [seq_length]) for layer in range(model.num_hidden_layers)]
    steps = [mtp_step_flops(model, [seq_length], step) for step in range(1, 1 + losses.mtp_steps)]
    costs = [_cost(flops, seq_length, parallel, rates) for flops in layers]
    if losses.train_only is not None:
        costs = [(forward, *(0.0,) * len(rest)) for forward, *rest in costs]
    mtp = sum_costs((0.0,) * kinds, *(_cost(flops, seq_length, parallel, rates) for flops in steps))
    head, products = head_flops(model, 1), _head_products(losses) / 3
    return costs, mtp, (products * head * rates.head[0], products * head * rates.head[1], 0.0)[:kinds]


def _head_products(losses: LossConfig) -> int:
    """Products of the head with all rows: logits, and the gradients of hidden states and weight that are wanted."""
    main = 1 if losses.train_only is not None else 3
    detached = losses.mtp_detaches or losses.train_only is not None
    again = losses.mtp_loss == "tv"  # the main logits, beside those of the steps
    return main + again + losses.mtp_steps * (2 if detached else 3)


def _cost(flops: LayerFlops, seq_length: int, parallel: ParallelConfig, rates: Rates) -> Cost:
    """A token of a layer."""
    forward, backward = (
        sum(count * getattr(rates, kind)[way] for kind, count in flops._asdict().items()) / seq_length for way in (0, 1)
    )
    # Selections are kept, and the experts' down projection is spared: a third of their products.
    repeated = {"products": 1.0, "experts": 2 / 3, "attention": 1.0}
    again = sum(share * getattr(flops, kind) * getattr(rates, kind)[0] for kind, share in repeated.items()) / seq_length
    again *= REPEATED[parallel.recompute_granularity]
    if not parallel.defers_weights:
        return forward, backward + again
    weights = (flops.products * rates.products[1] + flops.experts * rates.experts[1]) / 2 / seq_length
    return forward, backward - weights + again, weights


def sum_costs(*costs: Cost) -> Cost:
    return tuple(map(sum, zip(*costs, strict=True)))
