"""Optimizer and gradient norm on FSDP2 shards over a mesh of one."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from megatron_glm.config import OptimizerConfig
from megatron_glm.config.parameters import Parameter
from megatron_glm.parallel.fsdp import local
from megatron_glm.parallel.groups import ParallelGroups
from megatron_glm.parallel.shard import ShardInfo
from megatron_glm.training.optimizer import build_optimizer, clipping, gradient_norm, gradient_squares
from tests.helpers.reference import single_groups


class FakeGroup:
    """A process group of which only the size matters."""

    def __init__(self, size: int) -> None:
        self.count = size

    def size(self) -> int:
        return self.count


@pytest.fixture(scope="module")
def groups() -> ParallelGroups:
    return single_groups()


class Net(nn.Module):
    """A dense and an "expert" matrix, a norm, and a frozen matrix."""

    def __init__(self, copies: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense, self.expert, self.frozen = (nn.Linear(6, 6, bias=False) for _ in range(3))
        self.norm = nn.LayerNorm(6, bias=False)
        self.frozen.weight.requires_grad_(False)
        replicas = {"norm.weight": (FakeGroup(copies),)} if copies > 1 else {}
        self.shards = {
            name: ShardInfo(tuple(p.shape), (0,) * p.dim(), replicas.get(name, ()), (), "expert" in name)
            for name, p in self.named_parameters()
        }
        kinds = {name: "norm" if p.dim() == 1 else "matrix" for name, p in self.named_parameters()}
        self.declared = {name: Parameter(name, (), "attention", kind) for name, kind in kinds.items()}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.expert(self.norm(self.dense(self.frozen(x)))).square().sum()


def sharded(net: Net, groups: ParallelGroups) -> Net:
    fully_shard(net.expert, mesh=DeviceMesh.from_group(groups.edp, "cpu"))
    fully_shard(net, mesh=DeviceMesh.from_group(groups.dp_cp, "cpu"))
    return net


def test_only_trained_parameters_have_state_and_only_matrices_decay(groups):
    net = sharded(Net(), groups)
    optimizer = build_optimizer(OptimizerConfig(lr=0.1, weight_decay=0.5), [net])
    held = {id(p) for p in optimizer.state}
    assert held == {id(net.dense.weight), id(net.expert.weight), id(net.norm.weight)}
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay == {id(net.dense.weight): 0.5, id(net.expert.weight): 0.5, id(net.norm.weight): 0.0}


def test_frozen_weights_do_not_move_and_a_step_equals_torchs(groups):
    net, plain = sharded(Net(), groups), Net()
    config = OptimizerConfig(lr=0.1, weight_decay=0.5, adam_beta2=0.95)
    ours = build_optimizer(config, [net])
    theirs = torch.optim.AdamW(
        [
            {"params": [plain.dense.weight, plain.expert.weight], "weight_decay": 0.5},
            {"params": [plain.norm.weight], "weight_decay": 0.0},
        ],
        lr=0.1,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    x = torch.randn(5, 6)
    for _ in range(3):
        for model, optimizer in ((net, ours), (plain, theirs)):
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
    start = Net()
    assert torch.equal(local(net.frozen.weight), start.frozen.weight)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(local(net.get_parameter(name)), parameter, rtol=1e-5, atol=1e-6)
        if parameter.requires_grad:
            assert not torch.equal(parameter, start.get_parameter(name))


def test_bf16_moments_are_the_rounded_ones_of_a_step_in_fp32(groups):
    net = sharded(Net(), groups)
    config = OptimizerConfig(lr=0.1, weight_decay=0.5, adam_beta1=0.9, adam_beta2=0.95, adam_moments_dtype="bf16")
    optimizer = build_optimizer(config, [net])
    weight = net.dense.weight
    mean = square = torch.zeros(6, 6)
    value = local(weight).detach().clone()
    for step in range(1, 4):
        optimizer.zero_grad()
        net(torch.randn(5, 6)).backward()
        gradient = local(weight.grad) * 0.5
        optimizer.step(0.5)
        mean = 0.9 * mean.float() + 0.1 * gradient
        square = 0.95 * square.float() + 0.05 * gradient**2
        denominator = (square / (1 - 0.95**step)).sqrt() + config.adam_eps
        value = value * (1 - 0.1 * 0.5) - 0.1 * mean / (1 - 0.9**step) / denominator
        mean, square = mean.bfloat16(), square.bfloat16()
        state = {name: local(optimizer.state[weight][name]) for name in ("exp_avg", "exp_avg_sq")}
        assert {moment.dtype for moment in state.values()} == {torch.bfloat16}
        for moment, expected in ((state["exp_avg"], mean), (state["exp_avg_sq"], square)):
            torch.testing.assert_close(moment, expected, rtol=2**-7, atol=0)
        torch.testing.assert_close(local(weight).detach(), value, rtol=1e-4, atol=1e-4)
        mean, square = (moment.clone() for moment in state.values())


def test_bf16_moments_need_betas_that_move_them():
    with pytest.raises(ValueError, match=r"--adam-beta2 is 0.999 with --adam-moments-dtype bf16"):
        OptimizerConfig(adam_moments_dtype="bf16").check(1)
    with pytest.raises(ValueError, match=r"--adam-beta1 is 0.99 with --adam-moments-dtype bf16"):
        OptimizerConfig(adam_moments_dtype="bf16", adam_beta1=0.99, adam_beta2=0.98).check(1)
    OptimizerConfig(adam_moments_dtype="bf16", adam_beta2=0.98).check(1)


def test_norm_and_clipping_equal_torchs(groups):
    net, plain = sharded(Net(), groups), Net()
    x = torch.randn(5, 6)
    net(x).backward()
    plain(x).backward()
    norm = gradient_norm(gradient_squares([net])[1], groups.world)
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    assert norm == pytest.approx(expected.item(), rel=1e-6)
    build_optimizer(OptimizerConfig(lr=0.1), [net]).step(clipping(norm, 0.01))
    for name, parameter in plain.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(local(net.get_parameter(name).grad), parameter.grad, rtol=1e-3, atol=0)
    clipped = gradient_norm(gradient_squares([net])[1], groups.world)
    assert clipped == pytest.approx(0.01, rel=1e-6)
    assert clipping(clipped, 1.0) == clipping(clipped, 0.0) == 1.0, "below the bound, or none"


def test_a_replicated_gradient_counts_once(groups):
    """A tensor that four ranks hold adds a quarter of its squares on each of them."""
    net = sharded(Net(copies=4), groups)
    net(torch.randn(5, 6)).backward()
    squares = {name: local(p.grad).square().sum().item() for name, p in net.named_parameters() if p.requires_grad}
    expected = squares["dense.weight"] + squares["expert.weight"] + squares["norm.weight"] / 4
    assert gradient_norm(gradient_squares([net])[1], groups.world) == pytest.approx(expected**0.5, rel=1e-6)


def test_the_norm_of_a_large_gradient_is_exact(groups):
    """A sum of squares in fp32, one after the other, is off by 4e-4 at 1e7 elements."""
    net = nn.Linear(1, 10_000_000, bias=False)
    net.shards = {"weight": ShardInfo((10_000_000, 1), (0, 0), (), (), False)}
    net.weight.grad = torch.full_like(net.weight, 0.1)
    expected = 0.1 * 10_000_000**0.5
    assert gradient_norm(gradient_squares([net])[1], groups.world) == pytest.approx(expected, rel=1e-6)


def test_a_stage_without_trained_parameters_takes_part(groups):
    net = sharded(Net().requires_grad_(False), groups)
    optimizer = build_optimizer(OptimizerConfig(), [net])
    names, squares = gradient_squares([net])
    assert names == [] and gradient_norm(squares, groups.world) == 0.0
    before = [local(p).clone() for p in net.parameters()]
    optimizer.step(0.5)
    optimizer.zero_grad()
    assert all(torch.equal(local(p), old) for p, old in zip(net.parameters(), before, strict=True))
    assert optimizer.steps == 1
