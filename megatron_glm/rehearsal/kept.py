"""Bytes of the tensors that autograd keeps between forwards and backwards, at their peak."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from megatron_glm.torch_private import private

private(__name__, "torch.Tensor._base", "torch.UntypedStorage._cdata")


class KeptTensors(AbstractContextManager):
    """Counts storages while a saved tensor refers to them; parameters are not counted.

    `peak` [bytes] is the most at any time. Tensors that an operation keeps past autograd's notice are not seen.
    """

    def __init__(self) -> None:
        self.peak = self.now = 0
        self._references: Counter[int] = Counter()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor)

    def __enter__(self) -> KeptTensors:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: Tensor) -> _Saved:
        return _Saved(self, tensor)


class _Saved:
    def __init__(self, owner: KeptTensors, tensor: Tensor) -> None:
        self.tensor, self.owner = tensor, owner
        storage, base = tensor.untyped_storage(), tensor if tensor._base is None else tensor._base
        self.storage, self.nbytes = storage._cdata, storage.nbytes()  # not its address: FSDP2 frees and takes memory
        self.counts = not isinstance(base, nn.Parameter)
        if self.counts:
            owner._references[self.storage] += 1
            if owner._references[self.storage] == 1:
                owner.now += self.nbytes
                owner.peak = max(owner.peak, owner.now)

    def __del__(self) -> None:
        if self.counts:
            references = self.owner._references
            references[self.storage] -= 1
            if references[self.storage] == 0:
                self.owner.now -= self.nbytes
