"""AdamW over the fp32 masters, and a gradient norm that counts every element of the model once in every layout."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed import ProcessGroup

from megatron_glm.config import OptimizerConfig
from megatron_glm.model.glm import GLMChunk
from megatron_glm.parallel.fsdp import local
from megatron_glm.parallel.shard import ShardInfo
from megatron_glm.parallel.whole_weights import held_copy
from megatron_glm.torch_private import private

foreach_mul_, foreach_add_, foreach_norm = private(
    __name__, "torch._foreach_mul_", "torch._foreach_add_", "torch._foreach_norm"
)

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW(torch.optim.AdamW):
    """torch's AdamW with a factor for the gradients, and moments that may be bf16: a step computes in fp32 and rounds.

    On CUDA one pass does it all, copies of the masters included.
    """

    steps = 0  # that the moments have seen: iterations less the skipped ones, counted anew with a fresh optimizer

    def set_steps(self, steps: int) -> None:
        """Go on after `steps` steps. The moments themselves are loaded by the checkpoint's reader."""
        self.steps = steps
        for moments in self.state.values():
            moments["step"].fill_(steps)

    @torch.no_grad()
    def step(self, scale: float = 1.0) -> None:
        """Update with scale * gradient, which is what the gradients are afterwards, or still unscaled on CUDA."""
        self.steps += 1
        groups = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        parameters = [parameter for _, members in groups for parameter in members]
        if not parameters:
            return
        if local(parameters[0]).is_cuda:
            for group, members in groups:
                self._step_on_cuda(group, members, scale)
            changed = [parameter if (copy := held_copy(parameter)) is None else copy for parameter in parameters]
        else:
            if scale != 1.0:
                foreach_mul_([local(parameter.grad) for parameter in parameters], scale)
            self._step_on_cpu([self.state[parameter] for parameter in parameters])
            changed = parameters
        # autograd does not know of the change: what was made of a tensor is made anew when this version is another
        increment_version(changed)

    def _step_on_cpu(self, states: list[dict[str, Any]]) -> None:
        dtype = states[0]["exp_avg"].dtype
        for state in states:
            state.update({moment: state[moment].float() for moment in MOMENTS})
        super().step()
        for state in states:
            state.update({moment: state[moment].to(dtype) for moment in MOMENTS})

    def _step_on_cuda(self, group: dict[str, Any], parameters: list[nn.Parameter], scale: float) -> None:
        from megatron_glm.ops.triton.adamw import adamw

        states = [self.state[parameter] for parameter in parameters]
        if states:
            foreach_add_([state["step"] for state in states], 1)
        for parameter, state in zip(parameters, states, strict=True):
            assert parameter.grad is not None
            mean, square = (local(state[moment]) for moment in MOMENTS)
            rate, decay, betas, eps = (group[name] for name in ("lr", "weight_decay", "betas", "eps"))
            tensors = local(parameter), local(parameter.grad), mean, square
            adamw(*tensors, held_copy(parameter), state["step"], rate, decay, betas, eps, scale)


def build_optimizer(config: OptimizerConfig, chunks: Iterable[GLMChunk]) -> AdamW:
    """AdamW over the parameters that require a gradient; its state exists from the start, so that a load can fill it.

    Vectors (norms, biases) have no weight decay. One parameter group holds parameters of one mesh (experts are sharded
    over another than the rest) because the fused kernel takes a list of one mesh only.
    """
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {(False, False): []}  # a stage may have nothing to train
    for chunk in chunks:
        for name, parameter, shard in trained_parameters([chunk]):
            groups.setdefault((shard.expert, chunk.declared[name].decays), []).append(parameter)
    optimizer = AdamW(
        [
            {"params": parameters, "weight_decay": config.weight_decay if decays else 0.0}
            for (_, decays), parameters in groups.items()
        ],
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        fused=True,
    )
    dtype = torch.bfloat16 if config.adam_moments_dtype == "bf16" else torch.float32
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            moments = {name: torch.zeros_like(parameter, dtype=dtype, requires_grad=False) for name in MOMENTS}
            optimizer.state[parameter] = {"step": torch.zeros((), device=parameter.device), **moments}
    return optimizer


def trained_parameters(chunks: Iterable[GLMChunk]) -> Iterator[tuple[str, nn.Parameter, ShardInfo]]:
    """Canonical name, parameter and share of everything that the optimizer moves."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad:
                yield name, parameter, chunk.shards[name]


@torch.no_grad()
def gradient_squares(chunks: Sequence[GLMChunk]) -> tuple[list[str], Tensor]:
    """Names [n], and this rank's share of the squared L2 norm of each one's gradient: fp64 [n]; the ranks' sum counts.

    A rank adds the squares of its own shard divided by the number of ranks that hold the same shard, so that a
    replicated element counts once. Gradients must already be complete (summed over data and tensor ranks).
    """
    names, gradients, weights = [], [], []
    for name, parameter, shard in trained_parameters(chunks):
        if parameter.grad is not None and not shard.copy:
            names.append(name)
            gradients.append(local(parameter.grad))
            weights.append(1.0 / math.prod(group.size() for group in shard.replica_groups))
    if not names:  # nothing of this stage is trained
        device = next(parameter.device for chunk in chunks for parameter in chunk.parameters())
        return names, torch.zeros(0, dtype=torch.float64, device=device)
    # On a CPU torch adds the squares one after the other: in fp32 the norm of 1e7 elements was off by 4e-4.
    dtype = torch.float32 if gradients[0].is_cuda else torch.float64
    squares = torch.stack(foreach_norm(gradients, dtype=dtype)).double().square()
    return names, squares * torch.tensor(weights, dtype=torch.float64, device=squares.device)


def gradient_norm(squares: Tensor, world: ProcessGroup) -> float:
    """L2 norm of the gradient of the whole model: one all-reduce of `gradient_squares` over `world`."""
    total = squares.sum()
    dist.all_reduce(total, group=world)
    return total.sqrt().item()


def clipping(norm: float, max_norm: float) -> float:
    """Factor of every gradient: max_norm / norm where the norm of the whole gradient exceeds `max_norm` > 0, else 1."""
    return max_norm / norm if 0 < max_norm < norm else 1.0
