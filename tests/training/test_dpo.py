"""The loss of preferences against two forwards of the Hugging Face class and their autograd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_glm.config import KernelConfig, PreferenceConfig, RunConfig, TrainConfig
from megatron_glm.data.packing import PackedBatch, Piece, build_batch
from megatron_glm.model.preference import by_document
from megatron_glm.training.engine import Engine, losses_of
from megatron_glm.training.initialize import build_chunks
from megatron_glm.training.step import count
from tests.helpers.reference import canonical, gradient_errors, hf_model, recorded, single_groups, small_config

TOTAL, GAP = 64, 1e-5
PAIRS = ((5, 4, 9), (3, 12, 1), (6, 2, 7))  # tokens of the prompt, of the chosen and of the rejected answer


def pairs(vocab_size: int, seed: int, reference: Sequence[float] | None = None) -> list[Piece]:
    """Chosen and rejected documents in turn."""
    generator = torch.Generator().manual_seed(seed)
    pieces = []
    for prompt, *answers in PAIRS:
        ids = torch.randint(0, vocab_size, (prompt + sum(answers),), generator=generator)
        for n in answers:
            document = torch.cat([ids[:prompt], ids[prompt:][:n] if n == answers[0] else ids[-n:]]).numpy()
            targets = torch.arange(prompt + n).numpy() >= prompt
            pieces.append(Piece(document, targets, reference=reference[len(pieces)] if reference else 0.0))
    return pieces


def log_probs(hf: torch.nn.Module, pieces: Sequence[Piece]) -> list[Tensor]:
    """Of each document's targets, fp64 sums with a graph."""
    found = []
    for piece in pieces:
        ids = torch.from_numpy(piece.ids)
        logits = hf(ids.unsqueeze(0), use_cache=False).logits[0, :-1].double()
        chosen = logits.log_softmax(-1).gather(1, ids[1:].unsqueeze(1)).squeeze(1)
        found.append(chosen[torch.from_numpy(piece.targets)[1:]].sum())
    return found


def ours(hf: torch.nn.Module, model, preference: PreferenceConfig) -> tuple[torch.nn.Module, Engine]:
    kernels, train = KernelConfig("torch", loss_chunk_size=7), TrainConfig(global_batch_size=1, train_iters=1)
    config = RunConfig(model=model, kernels=kernels, preference=preference, train=train)
    [chunk] = build_chunks(config, single_groups())
    chunk.load_state_dict({canonical(name): value for name, value in hf.state_dict().items()})
    return chunk, Engine(config, single_groups(), [chunk])


def run(
    chunk: torch.nn.Module, engine: Engine, batch: PackedBatch
) -> tuple[dict[str, float], dict[str, Tensor], float]:
    """Losses over their counts, gradients, and how clear the selections were."""
    counts = count(engine.config, engine.groups, [batch]).losses
    assert counts["dpo"] == len(PAIRS) and counts["lm"] == sum(chosen for _, chosen, _ in PAIRS)
    with recorded() as seen:
        [found] = engine.forward_backward([batch], counts)
    gradients = {name: p.grad.clone() for name, p in chunk.named_parameters() if p.grad is not None}
    return {name: value.item() for name, value in found.items()}, gradients, seen.gap


def case(preference: PreferenceConfig, reference_moved: float):
    """A model, pieces with reference values that are off by `reference_moved`, and what `run` gives."""
    model = small_config()
    for seed in range(20):
        hf = hf_model(model, seed)
        with torch.no_grad():
            exact = [value.item() for value in log_probs(hf, pairs(model.vocab_size, seed))]
        moved = torch.randn(len(exact), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        reference = (torch.tensor(exact, dtype=torch.float64) + reference_moved * moved).tolist()
        pieces = pairs(model.vocab_size, seed, reference)
        chunk, engine = ours(hf, model, preference)
        result = run(chunk, engine, build_batch(pieces, TOTAL))
        if result[2] >= GAP:
            return hf, pieces, chunk, engine, result
    raise AssertionError(f"no seed of 20 gives selections that are clear by {GAP}")


def by_hand(hf: torch.nn.Module, pieces: Sequence[Piece], config: PreferenceConfig) -> dict[str, Tensor]:
    """The losses, from the formulas."""
    losses, accuracies, margins, found = [], [], [], log_probs(hf, pieces)
    for k in range(0, len(pieces), 2):
        chosen, rejected = (found[k + side] - pieces[k + side].reference for side in (0, 1))
        if config.dpo_average_log_probs:
            chosen, rejected = (x / pieces[k + i].targets.sum() for i, x in enumerate((chosen, rejected)))
        margin = config.dpo_beta * (chosen - rejected)
        smoothing = config.dpo_label_smoothing
        if config.dpo_loss_type == "ipo":
            losses.append((chosen - rejected - 1 / (2 * config.dpo_beta)) ** 2)
        else:
            losses.append(-(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin))
        accuracies.append(float(margin > 0))
        margins.append(margin.item())
    lm = -sum(found[0::2]) / sum(chosen for _, chosen, _ in PAIRS)
    dpo = torch.stack(losses).mean()
    return {
        "dpo": dpo,
        "lm": lm,
        "total": dpo + config.dpo_sft_loss_weight * lm,
        "rewards/accuracies": torch.tensor(accuracies).mean(),
        "rewards/margins": torch.tensor(margins).mean(),
    }


CONFIGS = {
    "plain": PreferenceConfig("dpo", dpo_beta=0.3),
    "smoothed": PreferenceConfig("dpo", dpo_beta=0.5, dpo_label_smoothing=0.1),
    "averaged": PreferenceConfig("dpo", dpo_beta=2.0, dpo_average_log_probs=True),
    "ipo": PreferenceConfig("dpo", dpo_beta=0.2, dpo_loss_type="ipo"),
    "with the chosen answers' cross entropy": PreferenceConfig("dpo", dpo_sft_loss_weight=0.7),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradients_equal_two_forwards_of_hugging_face(name):
    hf, pieces, _, _, (found, gradients, _) = case(CONFIGS[name], reference_moved=3.0)
    hf.zero_grad()
    wanted = by_hand(hf, pieces, CONFIGS[name])
    wanted.pop("total").backward()
    for key, value in wanted.items():
        assert found[key] == pytest.approx(value.item(), rel=2e-5, abs=1e-6), key
    theirs = {canonical(n): p.grad for n, p in hf.named_parameters() if p.grad is not None}
    errors = gradient_errors(gradients, theirs)
    assert max(errors.values()) <= 2e-5, sorted(errors.items(), key=lambda item: -item[1])[:5]


def test_the_start_is_ln_2_and_swapped_answers_turn_the_gradient():
    _, pieces, chunk, engine, (_, gradients, _) = case(CONFIGS["plain"], reference_moved=0.0)
    batch = build_batch(pieces, TOTAL)
    [found] = engine.ask([batch], "log-probs")
    exact = by_document(found["log_probs"], batch.documents, len(pieces)).tolist()
    same = [piece._replace(reference=value) for piece, value in zip(pieces, exact, strict=True)]
    for order, sign in ((same, 1), ([same[i ^ 1] for i in range(len(same))], -1)):
        chunk.zero_grad()
        counts = count(engine.config, engine.groups, [build_batch(order, TOTAL)]).losses
        [found] = engine.forward_backward([build_batch(order, TOTAL)], counts)
        assert found["dpo"].item() == pytest.approx(0.6931471805599453, abs=1e-7)
        assert found["rewards/margins"].item() == pytest.approx(0.0, abs=1e-10)
        turned = {name: sign * p.grad for name, p in chunk.named_parameters() if p.grad is not None}
        assert max(gradient_errors(turned, gradients).values()) <= 1e-5


def test_beta_0_has_no_gradient():
    *_, (found, gradients, _) = case(replace(CONFIGS["plain"], dpo_beta=0.0), reference_moved=1.0)
    assert found["dpo"] == pytest.approx(0.6931471805599453, abs=1e-7)
    assert not any(gradient.any() for gradient in gradients.values())


def test_a_pack_without_pairs_and_evaluation():
    _, pieces, _, engine, (found, _, _) = case(CONFIGS["plain"], reference_moved=1.0)
    empty, batch = build_batch([], TOTAL), build_batch(pieces, TOTAL)
    assert count(engine.config, engine.groups, [empty]).losses["dpo"] == 0
    [nothing] = engine.forward_backward([empty], dict.fromkeys(losses_of(engine.config), 0))
    assert not any(value.item() for value in nothing.values())
    [sums] = engine.evaluate([batch])
    for name, value in sums.items():
        counted = count(engine.config, engine.groups, [batch]).losses[name]
        assert value.item() / counted == pytest.approx(found[name], rel=1e-6), name
