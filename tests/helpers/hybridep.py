"""`deep_ep.HybridEPBuffer` as far as a dispatcher uses it, over gloo: what its kernels take and what they return."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Handle(NamedTuple):
    tokens: list[Tensor]  # of each local expert: the tokens of all ranks that its rows are, -1 for one that is zero
    rows: int


class HybridEPBuffer:
    """In each expert the last rank's tokens come first: the order of arrival is the kernels' own."""

    num_of_hybrid_ep_ranks_per_nvlink_domain: int

    def __init__(
        self,
        group,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
    ) -> None:
        self.sms = num_sms_dispatch_api, num_sms_combine_api
        self.group, self.hidden_dim, self.tokens = group, hidden_dim, max_num_of_tokens_per_rank
        self.n_local = num_local_experts

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        num_of_experts: int,
        num_of_experts_per_rank: int,
        pad_multiple: int | None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        handle: Handle | None = None,
        num_permuted_tokens: int | None = None,
        non_blocking: bool = False,
    ):
        assert hidden.shape == (self.tokens, self.hidden_dim) and hidden.is_contiguous()
        assert num_of_experts_per_rank == self.n_local and num_of_experts == self.n_local * self.group.size()
        assert (handle is None) == (routing_map is not None) and non_blocking == (handle is not None)
        local = slice(self.group.rank() * self.n_local, (self.group.rank() + 1) * self.n_local)
        if handle is None:
            assert routing_map.dtype == torch.bool and routing_map.shape == (self.tokens, num_of_experts)
            chosen = self._all(routing_map)[:, local].T
            handle = Handle([_padded(row.nonzero()[:, 0].flip(0), pad_multiple) for row in chosen], 0)
            handle = handle._replace(rows=sum(map(len, handle.tokens)))
        else:
            assert num_permuted_tokens == handle.rows
        tokens = torch.cat(handle.tokens)
        rows = self._all(hidden)[tokens.clamp(min=0)].masked_fill_((tokens < 0)[:, None], 0)
        row_probs = None
        if probs is not None:
            assert probs.dtype == torch.float32 and probs.shape == (self.tokens, num_of_experts)
            of_all = self._all(probs)[:, local].T
            of_rows = [p[t.clamp(min=0)].masked_fill_(t < 0, 0) for p, t in zip(of_all, handle.tokens, strict=True)]
            row_probs = torch.cat(of_rows)
        return rows, row_probs, None, torch.tensor([len(t) for t in handle.tokens]), handle

    def combine_with_unpermute(self, *, hidden: Tensor, probs: Tensor | None, handle: Handle, pad_multiple: int | None):
        assert hidden.shape == (handle.rows, self.hidden_dim) and hidden.is_contiguous()
        ranks, tokens = self.group.size(), torch.cat(handle.tokens)
        sums = torch.zeros(ranks * self.tokens, self.hidden_dim)
        sums.index_add_(0, tokens[tokens >= 0], hidden[tokens >= 0].float())
        dense = None
        if probs is not None:
            dense = torch.zeros(ranks * self.tokens, ranks * self.n_local)
            expert = torch.arange(self.n_local).repeat_interleave(torch.tensor([len(t) for t in handle.tokens]))
            dense[tokens[tokens >= 0], expert[tokens >= 0] + self.group.rank() * self.n_local] = probs[tokens >= 0]
            dense = self._mine(dense)
        return self._mine(sums).to(hidden.dtype), dense

    def _all(self, x: Tensor) -> Tensor:
        """[T, ...] of each rank -> [ranks * T, ...]."""
        parts = [torch.empty_like(x) for _ in range(self.group.size())]
        dist.all_gather(parts, x, group=self.group)
        return torch.cat(parts)

    def _mine(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self.group)
        return x.view(self.group.size(), self.tokens, -1)[self.group.rank()]


def _padded(tokens: Tensor, multiple: int | None) -> Tensor:
    return torch.nn.functional.pad(tokens, (0, -len(tokens) % multiple), value=-1) if multiple else tokens
