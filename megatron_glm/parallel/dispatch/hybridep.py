"""DeepEP's HybridEPBuffer (branch hybrid-ep) as a dispatcher: its kernels move the tokens and group them by expert."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from megatron_glm.config import RunConfig
from megatron_glm.parallel.dispatch.local import DispatchContext, Dispatcher

TOKENS = 64  # every rank passes the same number of tokens, a multiple of this
SCALED = 128  # hidden units to which the buffer has room for an fp32 scale


class HybridEPDispatcher(Dispatcher):
    """A token goes once to each rank of this NVLink domain that needs it, and once to each other domain.

    Micro-batches are filled up with tokens of no expert to one size, which the ranks need not agree on: that of the
    largest micro-batch. The order of an expert's rows is the kernels' own.
    """

    def __init__(self, context: DispatchContext) -> None:
        self.context = context
        self.tokens = -(-context.most_tokens // TOKENS) * TOKENS
        node = context.groups.ep_node
        self.domain = (node or context.groups.ep).size()  # ranks that NVLink connects
        self._made: Any = None

    def dispatch(
        self, x: Tensor, expert_ids: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, tuple[_Transport, int]]:
        transport = _Transport(self.buffer, self.context, self.tokens)
        rows, row_weights = _Dispatch.apply(x, weights, expert_ids, transport)
        assert transport.counts is not None
        return rows, row_weights, transport.counts.to(x.device), (transport, len(x))

    def combine(self, rows: Tensor, handle: tuple[_Transport, int]) -> Tensor:
        return _Combine.apply(rows, *handle)

    def traffic(self) -> dict[str, float]:
        c = self.context
        token = 2 * c.row_bytes + 4 * c.n_local * self.domain  # its weights are dense, for all experts of a domain
        return {group: rows * token for group, rows in c.rows_sent().items()}

    def buffer_bytes(self) -> int:
        """What HybridEPBuffer allocates: any rank's tokens may all come here. Both directions share it."""
        c, received = self.context, self.tokens * self.context.groups.ep.size()
        return received * (c.row_bytes + 4 * (c.n_local * self.domain + c.hidden_size // SCALED))

    @property
    def buffer(self) -> Any:
        """Made at the first dispatch, by all ranks of the group together."""
        if self._made is None:
            c = self.context
            sms = {f"num_sms_{way}_api": c.communication_sms or None for way in ("dispatch", "combine")}
            make = import_module("deep_ep").HybridEPBuffer
            self._made = make(c.groups.ep, c.hidden_size, self.tokens, c.n_local, **sms)
            found = self._made.num_of_hybrid_ep_ranks_per_nvlink_domain
            if found != self.domain:
                raise ValueError(
                    f"--expert-node-size {c.groups.ep_node and self.domain}: HybridEP finds {found} of the "
                    f"{c.groups.ep.size()} expert-parallel ranks connected by NVLink, not {self.domain}"
                )
        return self._made


class _Transport:
    """One dispatch and what belongs to it: its handle moves rows the same ways again, in the backward pass."""

    def __init__(self, buffer: Any, context: DispatchContext, tokens: int) -> None:
        self.buffer, self.tokens, self.n_experts = buffer, tokens, context.n_experts
        self.shape = {
            "num_of_experts": context.n_experts,
            "num_of_experts_per_rank": context.n_local,
            "pad_multiple": context.row_multiple if context.row_multiple > 1 else None,
        }
        self.counts: Tensor | None = None  # [n_local] int64, rows of each expert, in pinned memory
        self.handle: Any = None
        self.rows = 0

    def first(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """x [t, D], ids and weights [t, K] -> rows [n, D] and their weights [n] fp32. Waits for the device once."""
        chosen = ids.masked_fill(ids < 0, self.n_experts)  # one column more takes the slots of no expert
        routing = ids.new_zeros(self.tokens, self.n_experts + 1, dtype=torch.bool)
        dense = weights.new_zeros(self.tokens, self.n_experts + 1)
        routing[: len(ids)].scatter_(1, chosen, True)
        dense[: len(ids)].scatter_(1, chosen, weights)
        routing, dense = routing[:, :-1].contiguous(), dense[:, :-1].contiguous()
        rows, row_weights, _, self.counts, self.handle = self.buffer.dispatch_with_permute(
            hidden=self._filled(x), routing_map=routing, probs=dense, **self.shape
        )
        self.rows = len(rows)
        return rows, row_weights

    def again(self, x: Tensor) -> Tensor:
        """The same tokens' other rows, in the same order: x [t, D] -> [n, D]."""
        known = {"handle": self.handle, "num_permuted_tokens": self.rows, "non_blocking": True}
        return self.buffer.dispatch_with_permute(hidden=self._filled(x), **known, **self.shape)[0]

    def back(self, rows: Tensor, row_weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The sums of each token's rows [tokens, D], and of what goes with them [tokens, E]."""
        return self.buffer.combine_with_unpermute(
            hidden=rows.contiguous(), probs=row_weights, handle=self.handle, pad_multiple=self.shape["pad_multiple"]
        )

    def _filled(self, x: Tensor) -> Tensor:
        if len(x) > self.tokens:
            raise ValueError(f"a micro-batch of {len(x)} tokens: HybridEP's buffers hold {self.tokens} a rank")
        return torch.nn.functional.pad(x, (0, 0, 0, self.tokens - len(x))).contiguous()


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weights: Tensor, ids: Tensor, transport: _Transport):
        ctx.transport = transport
        ctx.save_for_backward(ids)
        return transport.first(x, ids, weights)

    @staticmethod
    def backward(ctx, grad_rows: Tensor, grad_weights: Tensor):
        (ids,) = ctx.saved_tensors
        grad_x, dense = ctx.transport.back(grad_rows, grad_weights.contiguous())
        taken = dense[: len(ids)].gather(1, ids.clamp(min=0)).masked_fill(ids < 0, 0)
        return grad_x[: len(ids)], taken, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, transport: _Transport, t: int):
        ctx.transport = transport
        return transport.back(rows)[0][:t]

    @staticmethod
    def backward(ctx, grad: Tensor):
        return ctx.transport.again(grad), None, None


def check(config: RunConfig) -> None:
    """Raises ValueError where HybridEP cannot serve this run on this machine."""
    model, parallel = config.model, config.parallel
    flag, ep = "--moe-token-dispatcher-type hybridep", parallel.expert_model_parallel_size
    if parallel.moe_token_dispatcher_type != "hybridep" or ep == 1:
        return
    if not torch.cuda.is_available() or find_spec("hybrid_ep_cpp") is None:
        lacks = (
            "DeepEP's HybridEPBuffer (docs/install.md says how to build it)" if torch.cuda.is_available() else "GPUs"
        )
        raise ValueError(f"{flag} lacks {lacks}; alltoall, and hybrid over several nodes, send the same rows by NCCL")
    if not config.train.bf16:
        raise ValueError(f"{flag} moves bfloat16 rows: give --bf16")
    if config.fp8.fp8_dispatch:
        raise ValueError(f"{flag} with --fp8-dispatch: its rows go in bfloat16; alltoall and hybrid send FP8")
    domain = parallel.expert_node_size or ep
    experts = model.n_routed_experts // ep * domain
    for what, size, multiple in (("hidden_size", model.hidden_size, 16), ("the experts of a domain", experts, 4)):
        if size % multiple:
            raise ValueError(f"{flag}: {what} must be a multiple of {multiple}, not {size}")
