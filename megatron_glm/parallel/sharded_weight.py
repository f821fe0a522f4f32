"""One weight that the ranks of a group share: its piece, the memory in which it is gathered, its gradients' sum."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property, partial
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from megatron_glm.ops.fp8 import BLOCK, BLOCKS, FP8, Blocks, scale_shape
from megatron_glm.ops.fp8_products import Fp8Products
from megatron_glm.ops.grad_sum import GradSum, add_pieces, set_grad_sum
from megatron_glm.parallel.collectives import all_gather_single, reduce_scatter_single
from megatron_glm.parallel.shard import shard_dim
from megatron_glm.parallel.whole_weights import HELD_COPY, CopyOf, fp8_products_of
from megatron_glm.torch_private import private

private(__name__, "torch.Tensor._version", "torch.nn.Module._parameters")

ALIGNMENT = 256  # bytes


class Part(NamedTuple):
    """A tensor that is gathered, of which each rank has `rows` along `dim`: of this shape where it is whole."""

    shape: tuple[int, ...]
    dim: int
    rows: int
    dtype: torch.dtype

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """Of what each rank sends."""
        return (*self.shape[: self.dim], self.rows, *self.shape[self.dim + 1 :])

    def gathered_shape(self, ranks: int) -> tuple[int, ...]:
        return (*self.shape[: self.dim], ranks * self.rows, *self.shape[self.dim + 1 :])

    def size(self, ranks: int) -> int:
        """In bytes, where it is gathered."""
        return ranks * math.prod(self.piece_shape) * self.dtype.itemsize

    def room(self, ranks: int) -> int:
        """The same, with what the next one's alignment needs."""
        return -(-self.size(ranks) // ALIGNMENT) * ALIGNMENT


class ShardedWeight:
    """A parameter of a module, of which each rank of `group` owns a piece along `shard_dim`, in torch's chunk sizes.

    The parameter becomes a DTensor of the pieces: what optimizer and checkpoints see. Other ranks are sent the piece in
    `dtype`, padded with rows to that of the first rank, or in FP8 where the parameter is. Where it has another dtype or
    fewer rows, that is a copy, which AdamW writes on CUDA (`held_copy`). While the module runs, `full` is in its place.

    Where the module's `products` are in FP8, and the ranks' pieces are whole blocks, the pieces are cast once a step,
    and values and scales are gathered. Nothing but these products can use such a weight.

    Args:
        narrow: leave the only gradient of a step in the dtype in which it was made; the sum of several is in fp32.
    """

    full: nn.Parameter  # the gathered weight; its memory is lent (`place`)
    total: Tensor | None = None  # the sum of this rank's gradients that is not reduced yet: the owner of a GradSum

    def __init__(
        self, module: nn.Module, name: str, group: ProcessGroup, mesh: DeviceMesh, dtype: torch.dtype, narrow: bool
    ) -> None:
        whole, ranks = getattr(module, name), group.size()
        self.module, self.name, self.group, self.mesh = module, name, group, mesh
        self.shape, self.stride, self.dtype, self.narrow = whole.shape, whole.stride(), dtype, narrow
        self.dim = shard_dim(self.shape, ranks)
        self.rows = -(-self.shape[self.dim] // ranks)
        self.counts = [max(0, min(self.rows, self.shape[self.dim] - r * self.rows)) for r in range(ranks)]
        first = min(group.rank() * self.rows, self.shape[self.dim])
        piece = whole.detach().narrow(self.dim, first, self.counts[group.rank()])
        self.master = nn.Parameter(self.distributed(piece.clone()), requires_grad=whole.requires_grad)
        setattr(module, name, self.master)
        self.cast = self._products()
        self.parts = self._parts(FP8 if whole.dtype == FP8 else dtype)
        self._copies: list[Tensor] = []
        self._copied: tuple[int, ...] = ()

    def _products(self) -> Fp8Products | None:
        """Those that take the weight in FP8, if the ranks' pieces are whole blocks."""
        even = self.dim == 0 and self.rows * self.group.size() == self.shape[0]
        blocks = even and (len(self.shape) == 3 or self.rows % BLOCK[0] == 0)
        return fp8_products_of(self.module, self.name) if blocks and self.master.dtype != FP8 else None

    def _parts(self, dtype: torch.dtype) -> list[Part]:
        part = Part(tuple(self.shape), self.dim, self.rows, dtype)
        if self.cast is None:
            return [part]
        scales = scale_shape(part.shape)
        return [part._replace(dtype=FP8), Part(scales, 0, scales[0] // self.group.size(), torch.float32)]

    def distributed(self, piece: Tensor) -> DTensor:
        """A tensor of the weight's shape, of which this rank has this piece."""
        placement = [Shard(self.dim)]
        return DTensor.from_local(
            piece.contiguous(), self.mesh, placement, run_check=False, shape=self.shape, stride=self.stride
        )

    @cached_property
    def piece(self) -> Tensor:
        """This rank's rows of the master, in its memory: of the first forward on, where it has its last."""
        master = self.master.detach()
        assert isinstance(master, DTensor)
        return master.to_local()

    @property
    def nbytes(self) -> int:
        """Of the memory in which it is gathered."""
        return sum(part.room(self.group.size()) for part in self.parts)

    @property
    def versions(self) -> tuple[int, ...]:
        """They change with what is sent."""
        return *self._master_versions(), *(copy._version for copy in self._copies)

    def _master_versions(self) -> tuple[int, ...]:
        return self.master._version, self.piece._version

    def place(self, received: Tensor, shown: Tensor) -> None:
        """Make `full` in this memory.

        Args:
            received, shown: the same `nbytes` bytes, with another counter of changes each: a gather is none that
                autograd should see, which finds the weights there again that a backward needs.
        """
        ranks, start, tensors = self.group.size(), 0, []
        self._received: list[Tensor] = []
        for part in self.parts:
            here = slice(start, start + part.size(ranks))
            self._received.append(received[here])
            gathered = shown[here].view(part.dtype).view(part.gathered_shape(ranks))
            tensors.append(gathered.narrow(part.dim, 0, part.shape[part.dim]))
            start += part.room(ranks)
        self.full = nn.Parameter(tensors[0], requires_grad=self.master.requires_grad)
        self._scales = tensors[1:]

    def refresh(self) -> bool:
        """Bring what is sent up to date with the master; returns whether it was not."""
        if self._sends_master or (versions := self._master_versions()) == self._copied:
            return False
        piece = self.piece
        if not self._copies:
            self._copies = [torch.zeros(p.piece_shape, dtype=p.dtype, device=piece.device) for p in self.parts]
            if self.master.requires_grad and self.cast is None and self.dtype != piece.dtype:
                setattr(self.master, HELD_COPY, self._own_rows(self._copies[0]))
        if self.cast is None:
            self._own_rows(self._copies[0]).copy_(piece)
        else:
            blocks = self.cast.cast_weight(piece, self.dtype)
            for copy, made in zip(self._copies, (blocks.values, blocks.scales), strict=True):
                copy.copy_(made)
        self._copied = versions
        return True

    @property
    def _sends_master(self) -> bool:
        return self.master.dtype == self.parts[0].dtype and self.piece.shape == self.parts[0].piece_shape

    def _own_rows(self, piece: Tensor) -> Tensor:
        """Without the padding."""
        return piece.narrow(self.dim, 0, self.counts[self.group.rank()])

    def gathers(self) -> list[Callable[[bool], dist.Work | None]]:
        """What gathers the parts that `refresh` has made, given whether to do so asynchronously; then `arrive`."""
        into = self._received
        if self.dim:  # the ranks' pieces lie one behind the other only along the first dim
            into = self._apart = [torch.empty_like(received) for received in self._received]
        pairs = zip(into, self._copies or [self.piece], strict=True)
        return [partial(self._gather, output, _bytes(sent)) for output, sent in pairs]

    def _gather(self, output: Tensor, sent: Tensor, asynchronous: bool) -> dist.Work | None:
        return all_gather_single(output, sent, group=self.group, async_op=asynchronous)

    def arrive(self) -> None:
        if self.dim:
            [part], [apart], [received], ranks = self.parts, self._apart, self._received, self.group.size()
            pieces = apart.view(ranks, *part.piece_shape[:-1], -1)  # bytes: torch.cat takes no FP8
            torch.cat(pieces.unbind(), dim=self.dim, out=received.view(*part.gathered_shape(ranks)[:-1], -1))
            del self._apart

    def show(self) -> None:
        """The module computes with `full`. Each time it does so, its gradient is added to the sum in fp32."""
        weight: Tensor = self.full
        if self.cast is not None:
            weight = weight.detach()
            setattr(weight, BLOCKS, Blocks(weight, *self._scales))
        if self.master.requires_grad:
            total = GradSum(self.full, self, "total", self.narrow)
            if self.cast is None:
                weight = CopyOf.apply(weight, weight.detach(), total)
            set_grad_sum(weight, total)
        self.module._parameters[self.name] = cast(nn.Parameter, weight)

    def hide(self) -> None:
        self.module._parameters[self.name] = self.master


class Reduction:
    """The sum over the ranks of a weight's `total`, which this takes; the rank's piece goes into the master's `.grad`.

    fp32 is reduced by NCCL. Where the gradients are narrower, or gloo moves them, the ranks exchange their pieces and
    add them in fp32, in the order of the ranks: the same bits in every run, and half the bytes on the way in bf16.
    """

    def __init__(self, weight: ShardedWeight) -> None:
        assert weight.total is not None
        self.weight, total = weight, weight.total
        weight.total = None
        ranks, group = weight.group.size(), weight.group
        self.scatters = total.dtype == torch.float32 and has_nccl(group)
        own = (*weight.shape[: weight.dim], weight.counts[group.rank()], *weight.shape[weight.dim + 1 :])
        if weight.dim:  # which all ranks divide
            pieces = total.view(*weight.shape[: weight.dim], ranks, weight.rows, *weight.shape[weight.dim + 1 :])
            total = pieces.movedim(weight.dim, 0)
        elif self.scatters and ranks * weight.rows != len(total):
            total = torch.cat([total, total.new_zeros(ranks * weight.rows - len(total), *total.shape[1:])])
        self.sent = total.contiguous()
        self.received = total.new_empty(weight.parts[0].piece_shape if self.scatters else (ranks, *own))
        grad, self.adds = weight.master.grad, weight.master.grad is not None
        if grad is None:
            grad = self.received[: own[0]] if self.scatters else torch.empty(own, device=total.device)
            grad = weight.master.grad = weight.distributed(grad)
        assert isinstance(grad, DTensor)
        self.grad = grad.to_local()

    def issue(self, asynchronous: bool) -> dist.Work | None:
        group = self.weight.group
        if self.scatters:
            return reduce_scatter_single(self.received.view(-1), self.sent.view(-1), group=group, async_op=asynchronous)
        size = math.prod(self.weight.shape) // self.weight.shape[self.weight.dim] * self.sent.itemsize
        sent, received = [count * size for count in self.weight.counts], self.received[0].nbytes
        into = _bytes(self.received)
        return dist.all_to_all_single(
            into, _bytes(self.sent), [received] * group.size(), sent, group=group, async_op=asynchronous
        )

    def finish(self) -> None:
        if not self.scatters:
            add_pieces(self.grad, self.received, self.adds)
        elif self.adds:
            self.grad.add_(self.received[: len(self.grad)])


def has_nccl(group: ProcessGroup) -> bool:
    return dist.get_backend(group) == "nccl"


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
