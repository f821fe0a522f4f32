"""On CUDA: fp32 gradients from the product, the loss by one pass over the logits, AdamW in one, against plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_glm.config import OptimizerConfig
from megatron_glm.config.parameters import Parameter
from megatron_glm.ops.grad_sum import embedding, linear
from megatron_glm.parallel.linear import replicated
from megatron_glm.parallel.vocab import Prediction, VocabParallelHead
from megatron_glm.parallel.whole_weights import WholeWeights, held_copy
from megatron_glm.training.optimizer import build_optimizer
from tests.helpers.reference import single_groups

pytestmark = pytest.mark.gpu
NAN = float("nan")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def error(value: Tensor, reference: Tensor) -> float:
    return ((value.double() - reference.double()).norm() / reference.double().norm().clamp_min(1e-30)).item()


def poison() -> None:
    """What is allocated next holds NaN."""
    torch.full((1 << 26,), NAN, device="cuda")


def declarations(module: torch.nn.Module) -> dict[str, Parameter]:
    kinds = {name: "matrix" if p.dim() > 1 else "norm" for name, p in module.named_parameters()}
    return {name: Parameter(name, (), "attention", kind) for name, kind in kinds.items()}


class Uses(torch.nn.Module):
    """One weight by `linear`, one by `embedding`, one as it is."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.matrix, self.table, self.scale = (
            torch.nn.Parameter(torch.randn(*shape, device="cuda")) for shape in ((rows, width), (50, width), (width,))
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return linear(embedding(tokens, self.table) * self.scale, self.matrix)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("rows, width, count", [(96, 64, 200), (1000, 328, 1), (24, 4096, 77)])
def test_masters_get_fp32_gradients_of_the_bf16_products(rows, width, count, keep):
    """Of one micro-batch, and of a second that is added in place."""
    module = Uses(rows, width)
    masters = dict(module.named_parameters())
    exact = {name: p.detach().bfloat16().float().requires_grad_() for name, p in masters.items()}
    WholeWeights(module, set(), torch.bfloat16, keep)
    places = {}
    for _ in range(2):
        tokens, grad = torch.randint(0, 50, (count,), device="cuda"), torch.randn(count, rows, device="cuda").bfloat16()
        poison()
        out = module(tokens)
        assert out.dtype == torch.bfloat16
        out.backward(grad)
        reference = F.linear(F.embedding(tokens, exact["table"]) * exact["scale"], exact["matrix"])
        reference.backward(grad.float())
        assert error(out, reference) < 5e-3
        for name, master in masters.items():
            assert master.grad.dtype == torch.float32 and error(master.grad, exact[name].grad) < 1e-2, name
            assert places.setdefault(name, master.grad.data_ptr()) == master.grad.data_ptr(), "added in place"
    # the product itself is not rounded to bf16
    assert not torch.equal(masters["matrix"].grad, masters["matrix"].grad.bfloat16().float())


@pytest.mark.parametrize("vocabulary, valid", [(10_000, 10_000), (9_001, 9_000), (333, 300)])
@pytest.mark.parametrize("chunk_size", [64, 4096])
def test_loss_and_gradients(vocabulary, valid, chunk_size):
    rows, width = 200, 128
    head = VocabParallelHead(vocabulary, width, single_groups().tp).cuda().bfloat16()
    head.valid = valid
    torch.nn.init.normal_(head.weight)
    hidden = (torch.randn(rows, width, device="cuda") / 4).bfloat16().requires_grad_()
    labels = torch.randint(0, valid, (rows,), device="cuda")
    labels[::5] = -100
    leaves = [x.detach().float().requires_grad_() for x in (hidden, head.weight)]
    expected = F.cross_entropy((leaves[0] @ leaves[1].T)[:, :valid], labels, ignore_index=-100, reduction="sum") / 7
    expected.backward()
    poison()
    loss = head([Prediction(hidden, labels, 1 / 7)], chunk_size)[0][0]
    loss.backward()
    assert loss.dtype == torch.float32 and abs(loss / expected - 1) < 2e-3
    assert error(hidden.grad, leaves[0].grad) < 1e-2 and error(head.weight.grad, leaves[1].grad) < 1e-2
    assert not hidden.grad[labels == -100].any() and not head.weight.grad[valid:].any()


@pytest.mark.parametrize("chunk_size", [64, 4096])
def test_a_factor_for_each_row(chunk_size):
    """The answers come first, over the whole vocabulary; then each row's loss has its factor."""
    rows, width, vocabulary, valid, seen = 200, 128, 9_001, 9_000, []
    head = VocabParallelHead(vocabulary, width, single_groups().tp).cuda().bfloat16()
    head.valid = valid
    torch.nn.init.normal_(head.weight)
    hidden = (torch.randn(rows, width, device="cuda") / 4).bfloat16().requires_grad_()
    labels, factors = torch.randint(0, valid, (rows,), device="cuda"), torch.randn(rows, device="cuda")
    labels[::5] = -100
    leaves = [x.detach().float().requires_grad_() for x in (hidden, head.weight)]
    logits = (leaves[0] @ leaves[1].T)[:, :valid]
    each = F.cross_entropy(logits, labels, ignore_index=-100, reduction="none")
    (each * factors).sum().backward()
    poison()
    loss = head([Prediction(hidden, labels, row_factors=lambda found: (seen.append(found), factors)[1])], chunk_size)[
        0
    ][0]
    loss.backward()
    assert (seen[0].log_probs + each).abs().max() < 0.05 and torch.equal(seen[0].tokens, labels)
    assert (loss - (each * factors).sum()).abs() < 2e-3 * (each * factors).abs().sum()
    assert error(hidden.grad, leaves[0].grad) < 1e-2 and error(head.weight.grad, leaves[1].grad) < 1e-2
    assert not hidden.grad[labels == -100].any() and not head.weight.grad[valid:].any()
    with torch.no_grad():
        answered: list = []
        _, best = head([Prediction(hidden, labels, row_factors=answered.append)], chunk_size, best=True)
    found = logits.gather(1, best[0].unsqueeze(1)).squeeze(1)
    assert torch.equal(best[0], answered[0].tokens) and (logits.amax(1) - found).max() < 0.05


def test_a_narrow_gradient_is_widened_when_a_second_one_comes():
    tokens, grad = torch.randint(0, 50, (30,), device="cuda"), torch.randn(2, 30, 96, device="cuda").bfloat16()
    module, found = Uses(96, 64), {}
    for narrow in (True, False):
        one = Uses(96, 64)
        one.load_state_dict(module.state_dict())
        WholeWeights(one, set(), torch.bfloat16, keep=True, narrow=narrow)
        found[narrow] = []
        for part in grad:
            one(tokens).backward(part)
            found[narrow].append(one.scale.grad.clone())
    first, total = found[True]
    assert (first.dtype, total.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(first.float(), found[False][0]) and torch.equal(total, found[False][1])


def test_the_optimizer_steps_as_torchs_and_renews_the_copies():
    module = Uses(1000, 328)
    masters = dict(module.named_parameters())
    plain = {name: p.detach().clone().requires_grad_() for name, p in masters.items()}
    module.shards = {name: replicated(tuple(p.shape), single_groups().tp) for name, p in masters.items()}
    module.declared = declarations(module)
    WholeWeights(module, set(), torch.bfloat16, keep=True)
    config = OptimizerConfig(lr=1e-2, weight_decay=0.1, adam_beta2=0.95)
    ours = build_optimizer(config, [module])
    matrices = [p for p in plain.values() if p.dim() > 1]
    theirs = torch.optim.AdamW(
        [{"params": matrices}, {"params": [plain["scale"]], "weight_decay": 0.0}],
        lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95),
    )  # fmt: skip
    tokens = torch.randint(0, 50, (64,), device="cuda")
    for _ in range(3):
        module(tokens).square().sum().backward()
        for name, parameter in plain.items():
            parameter.grad = masters[name].grad * 0.3
        ours.step(0.3)
        theirs.step()
        ours.zero_grad()
        for name, master in masters.items():
            torch.testing.assert_close(master, plain[name], rtol=1e-5, atol=1e-6)
            assert torch.equal(held_copy(master), master.bfloat16()), name
    fresh = Uses(1000, 328)
    fresh.load_state_dict(module.state_dict())
    with torch.no_grad():
        assert torch.equal(module(tokens), fresh.bfloat16()(tokens)), "the next forward sees what the step has written"


def test_bf16_moments_are_those_of_the_cpu():
    config = OptimizerConfig(lr=1e-2, weight_decay=0.1, adam_beta2=0.95, adam_moments_dtype="bf16")
    modules = {device: torch.nn.Linear(700, 333, bias=False).to(device) for device in ("cpu", "cuda")}
    modules["cuda"].load_state_dict(modules["cpu"].state_dict())
    optimizers = {}
    for device, module in modules.items():
        module.shards = {"weight": replicated((333, 700), single_groups().tp)}
        module.declared = declarations(module)
        optimizers[device] = build_optimizer(config, [module])
    for _ in range(3):
        gradient = torch.randn(333, 700)
        for device, module in modules.items():
            module.weight.grad = gradient.to(device, copy=True)  # the step scales it in place
            optimizers[device].step(0.3)
        weights = [module.weight for module in modules.values()]
        # A moment whose rounding falls to the other side moves a weight by less than 2 % of a step.
        torch.testing.assert_close(weights[1].cpu(), weights[0], rtol=1e-5, atol=2e-4)
        for name in ("exp_avg", "exp_avg_sq"):
            cpu, cuda = (optimizers[device].state[modules[device].weight][name] for device in ("cpu", "cuda"))
            assert cpu.dtype == cuda.dtype == torch.bfloat16
            torch.testing.assert_close(cuda.cpu(), cpu, rtol=2**-7, atol=3e-4)
