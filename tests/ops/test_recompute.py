"""What the backward computes again, by recompute granularity: counted, not believed."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_glm.model import indexer as model_indexer
from megatron_glm.model import router
from megatron_glm.model.pack import PackRows
from megatron_glm.ops import dense_mla, sparse_mla
from megatron_glm.ops.grad_sum import linear
from megatron_glm.ops.recompute import RecomputeCache, keep_choice
from tests.helpers.reference import forward, single_chunk, small_config

TOKENS = 24
ATTENTION = {"sparse_mla", "dense_mla"}


class Count(TorchDispatchMode):
    """Matrix products by the shapes of their inputs, and this package's forwards of attention and choices by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter = Counter()
        self.patches = pytest.MonkeyPatch()

    def __enter__(self):
        for module, name in ((router, "select_experts"), (model_indexer, "index_topk")):
            self.patches.setattr(module, name, self.counted(name, getattr(module, name)))
        for module, name in ((sparse_mla, "sparse_mla"), (dense_mla, "dense_mla")):
            forward, backward = module.BACKENDS["torch"]
            self.patches.setitem(module.BACKENDS, "torch", (self.counted(name, forward), backward))
        return super().__enter__()

    def __exit__(self, *error):
        self.patches.undo()
        return super().__exit__(*error)

    def counted(self, name, function):
        def call(*args):
            self.found[name] += 1
            return function(*args)

        return call

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is torch.ops.aten.mm.default:
            self.found[tuple(args[0].shape), tuple(args[1].shape)] += 1
        return operator(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def case():
    """A model whose products have shapes of their own, and a function: granularity -> what runs again."""
    config = small_config(
        hidden_size=40, q_lora_rank=26, kv_lora_rank=20, intermediate_size=72, moe_intermediate_size=44, v_head_dim=6
    )
    chunk = single_chunk(config)
    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter.normal_(std=0.05)
    tokens = torch.randint(0, config.vocab_size, (TOKENS,))
    pack = PackRows.build(config, (15, 9), TOKENS)
    assert pack.dense is not None and pack.sparse is not None

    def backward(granularity: str) -> Counter:
        chunk.recompute = granularity
        loss = forward(chunk, tokens, pack, tokens).loss
        with Count() as count:
            loss.backward()
        return count.found

    alone = backward("none")
    return config, lambda granularity: backward(granularity) - alone


def dear(config) -> dict[str, tuple]:
    """The products that selective recomputation keeps, but for those of the experts, whose rows depend on routing."""
    d, t, latent, value = config.hidden_size, TOKENS, config.kv_lora_rank, config.num_attention_heads * 6
    shared = config.n_shared_experts * config.moe_intermediate_size
    widths = {
        "q_a": (d, config.q_lora_rank),
        "kv_a": (d, latent + config.qk_rope_head_dim),
        "o": (value, d),
        "gate and up": (d, config.intermediate_size),
        "shared gate and up": (d, shared),
        "index key": (d, config.index_head_dim),
    }
    assert len(set(widths.values())) == len(widths)
    return {name: ((t, inside), (inside, out)) for name, (inside, out) in widths.items()}


def expert_products(found: Counter, config) -> int:
    inside, out = config.hidden_size, 2 * config.moe_intermediate_size
    return sum(n for key, n in found.items() if key[1] == (inside, out) and key[0][0] != TOKENS)


def test_full_runs_all_products_again_and_no_choice(case):
    config, again = case
    found = again("full")
    assert not {"index_topk", "select_experts"} & found.keys()
    missing = [name for name, shapes in dear(config).items() if shapes not in found]
    assert missing == ["index key"]  # the indexer is not needed once its choice is kept
    assert ATTENTION <= found.keys() and expert_products(found, config)


def test_selective_runs_nothing_dear_again(case):
    config, again = case
    found = again("selective")
    assert [name for name, shapes in dear(config).items() if shapes in found] == []
    assert not found.keys() & (ATTENTION | {"index_topk", "select_experts"})
    assert expert_products(found, config) == 0
    layers = config.num_hidden_layers
    q_b = (TOKENS, config.q_lora_rank), (config.q_lora_rank, config.num_attention_heads * config.qk_head_dim)
    assert found[q_b] == layers  # what is cheap for its bytes does run again


def test_a_kept_result_that_was_changed_is_an_error():
    kept = RecomputeCache(products=True)
    with kept.running(second=False):
        linear(torch.ones(2, 2), torch.ones(2, 2), kept=True).add_(1)
    with kept.running(second=True), pytest.raises(RuntimeError, match="changed in place"):
        linear(torch.ones(2, 2), torch.ones(2, 2), kept=True)


def test_marks_do_nothing_outside_a_recomputed_layer_and_products_are_not_kept_by_full():
    calls = []
    assert keep_choice(lambda: calls.append(1) or 5) == 5 and calls == [1]
    kept = RecomputeCache(products=False)
    with kept.running(second=False):
        linear(torch.ones(2, 2), torch.ones(2, 2), kept=True)
    assert not kept.results
