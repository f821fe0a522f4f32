"""The cases of `benchmark.py kernels`: inputs, a check against fp32 and the library calls that are the peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measure import documents_of, judge, milliseconds, relative_error, times
from torch import Tensor

from megatron_glm.config import KernelConfig, ModelConfig, ParallelConfig, RunConfig
from megatron_glm.model.mla import MLA
from megatron_glm.model.moe import Experts
from megatron_glm.model.pack import PackRows
from megatron_glm.model.router import Router
from megatron_glm.ops import dense_mla, indexer, sparse_mla
from megatron_glm.ops.experts import grouped_mlp
from megatron_glm.ops.rows import put_rows, row_count
from megatron_glm.parallel.dispatch.local import LocalDispatcher
from megatron_glm.parallel.groups import ParallelGroups

SLOTS, LATENT, WIDTH, HEADS = 2048, 512, 576, 64
SCALE = 256**-0.5
SAMPLE = 128  # rows that the fp32 reference computes of a large case


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def compared(run: Callable[[], object], peers: dict[str, Callable[[], object]]) -> tuple[float, dict[str, float]]:
    """Milliseconds of `run` and of its peers."""
    measured = times(ours=run, **peers)
    return measured.pop("ours"), measured


def packed(documents: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Key range [start, end) of each row, int32."""
    lengths = torch.tensor(documents)
    first = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    return first.int().cuda(), torch.arange(1, len(first) + 1, dtype=torch.int32, device="cuda")


def zigzag(tokens: int, ranks: int, rank: int) -> tuple[Tensor, Tensor]:
    """The ranges of one context-parallel rank's rows of a single document."""
    part = tokens // (2 * ranks)
    chunks = torch.arange(tokens).view(-1, part)[[rank, 2 * ranks - 1 - rank]]
    end = chunks.flatten().int().cuda() + 1
    return torch.zeros_like(end), end


def index_topk(chosen: list[str], tokens: list[int]) -> Iterator[dict]:
    cases: list[tuple[str, int, tuple[Tensor, Tensor]]] = []
    for total in tokens:
        cases.append((f"{total} one document", total, packed((total,))))
        thirds = (total // 2, total // 3, total - total // 2 - total // 3)
        cases.append((f"{total} packed 1/2 1/3 1/6", total, packed(thirds)))
        cases.append((f"{total} rank 0 of cp 4", total, zigzag(total, 4, 0)))
    for name, total, (start, end) in cases:
        rows = start.numel()
        iq, ik, w = normal(rows, 32, 128), normal(total, 128), torch.randn(rows, 32, device="cuda")
        segments = indexer.key_segments(start, end)
        sample = torch.randperm(rows, device="cuda")[:SAMPLE]
        reference = indexer.index_topk_torch(iq[sample], ik, w[sample], start[sample], end[sample], SLOTS)
        peers = {}
        if rows == total <= 32768 and len(segments) == 4:
            calls = partial(_index_calls, iq, ik, w, end, torch.zeros_like(end[:1]))
            peers = {"cuDNN calls": calls, "torch.topk": _index_torch(iq, ik, w, end)}
        operations = 2 * 32 * 128 * (end - start).sum().item()
        for backend in chosen:
            planned = (segments,) if backend in indexer.PLANNED_ON_HOST else ()
            run = partial(indexer.BACKENDS[backend], iq, ik, w, start, end, SLOTS, *planned)
            time, measured = compared(run, peers)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            wrong = _other_keys(run()[sample], reference, iq[sample], ik, w[sample])
            extra = (torch.cuda.max_memory_allocated() - before - 4 * rows * SLOTS) / 2**20
            yield {
                "backend": backend, "case": name, "ms": time, "tflops": operations / time / 1e9, "peers": measured,
                "extra_mib": extra, "check": f"{extra:.0f} MiB beside the selection, {wrong}",
            }  # fmt: skip


def _index_calls(iq: Tensor, ik: Tensor, w: Tensor, end: Tensor, offset: Tensor):
    from cudnn import DSA

    scores = DSA.indexer_forward_wrapper(iq[None], ik[None, :, None], w[None], ratio=1, q_causal_offsets=offset)
    return DSA.indexer_top_k_wrapper(scores["scores"][0], end, SLOTS, return_val=False, deterministic=True)


def _index_torch(iq: Tensor, ik: Tensor, w: Tensor, end: Tensor) -> Callable[[], object]:
    scores = torch.randn(min(8192, iq.shape[0]), ik.shape[0], device=iq.device)
    return lambda: [scores.topk(SLOTS, dim=1) for _ in range(iq.shape[0] // scores.shape[0])]


def _other_keys(chosen: Tensor, reference: Tensor, iq: Tensor, ik: Tensor, w: Tensor) -> str:
    """Keys that the two selections do not share; legitimate only where their scores differ by rounding."""
    worst, count = 0.0, 0
    for row in (chosen != reference).any(1).nonzero().flatten().tolist():
        ours, theirs = (set(x[row][x[row] >= 0].tolist()) for x in (chosen, reference))
        apart = sorted(ours ^ theirs)
        count += len(apart) // 2
        scores = w[row].double() @ torch.relu(iq[row].double() @ ik[apart].double().T)
        limit = w[row].double().abs() @ torch.relu(iq[row].double() @ ik[apart].double().T)
        if len(ours) != len(theirs) or ours == theirs:
            return "WRONG count or order"
        worst = max(worst, ((scores.max() - scores.min()) / limit.max()).item())
    return f"{count} keys differ by scores {worst:.0e} apart{' WRONG' if worst > 1e-5 else ''}"


def selection(rows: int, total: int, short: bool = False) -> tuple[Tensor, Tensor]:
    """Random ascending keys, -1 behind a row's length."""
    idx = torch.randint(0, total - SLOTS + 1, (rows, SLOTS), dtype=torch.int32, device="cuda").sort(1).values
    idx += torch.arange(SLOTS, dtype=torch.int32, device="cuda")
    length = torch.full((rows,), SLOTS, dtype=torch.int32, device="cuda")
    if short:
        length = torch.randint(0, SLOTS + 1, (rows,), dtype=torch.int32, device="cuda")
    return idx.masked_fill_(torch.arange(SLOTS, device="cuda") >= length[:, None], -1), length


def _sparse_cases(tokens: list[int]) -> Iterator[tuple[str, int, int, int, bool]]:
    for total in tokens:
        yield f"{total} x 64 heads", total, total, HEADS, False
    total = tokens[0]
    for heads in (8, 16, 32, 128):
        yield f"{total} x {heads} heads", total, total, heads, False
    yield f"{total} x 64 heads, short rows", total, total, HEADS, True
    yield f"{total} of {tokens[-1]} keys (cp)", total, tokens[-1], HEADS, False


def sparse_forward(chosen: list[str], tokens: list[int]) -> Iterator[dict]:
    from flash_mla import flash_mla_sparse_fwd

    from megatron_glm.ops.cudnn import LEGACY

    for name, rows, total, heads, short in _sparse_cases(tokens):
        q, kv = normal(rows, heads, WIDTH), normal(total, WIDTH)
        idx, length = selection(rows, total, short)
        sample = torch.randperm(rows, device="cuda")[:SAMPLE]
        reference = sparse_mla.sparse_mla_torch(
            q[sample].float(), kv.float(), idx[sample], length[sample], LATENT, SCALE
        )
        wide = F.pad(q, (0, 0, 0, 64 - heads)) if heads < 64 else q
        given = (wide, kv.unsqueeze(1), idx.unsqueeze(1), SCALE, LATENT, None, length)
        direct = partial(flash_mla_sparse_fwd, *given, **LEGACY)
        peers = {"FlashMLA": direct} if wide.numel() < 2**31 else {}
        for backend in chosen:
            run = partial(sparse_mla.BACKENDS[backend][0], q, kv, idx, length, LATENT, SCALE)
            out, lse = run()
            errors = {"out": relative_error(out[sample], reference[0]), "lse": _same(lse[sample], reference[1])}
            time, measured = compared(run, peers)
            rate = 2 * heads * length.sum().item() * (WIDTH + LATENT) / time / 1e9
            yield {
                "backend": backend, "case": name, "ms": time, "tflops": rate, "peers": measured, "check": judge(errors)
            }  # fmt: skip


def _same(value: Tensor, reference: Tensor) -> float:
    """Relative error of the finite entries; infinite ones must agree."""
    if not torch.equal(torch.isneginf(value), torch.isneginf(reference)):
        return float("nan")
    finite = torch.isfinite(reference)
    return relative_error(value[finite], reference[finite]) if finite.any() else 0.0


def sparse_backward(chosen: list[str], tokens: list[int]) -> Iterator[dict]:
    from cudnn import DSA

    for name, rows, total, heads, short in _sparse_cases(tokens):
        q, kv, grad = normal(rows, heads, WIDTH), normal(total, WIDTH), normal(rows, heads, LATENT)
        idx, length = selection(rows, total, short)
        out, lse = sparse_mla.BACKENDS[chosen[0]][0](q, kv, idx, length, LATENT, SCALE)
        sample = torch.randperm(rows, device="cuda")[: SAMPLE if rows > 4096 else rows]
        inputs = (x[sample].float() for x in (grad, q))
        reference = sparse_mla.sparse_mla_backward_torch(
            *inputs, kv.float(), out[sample].float(), lse[sample], idx[sample], length[sample], SCALE
        )
        wide = [F.pad(x, (0, 0, 0, 64 - heads)) if heads < 64 else x for x in (q, out, grad)]
        stats = F.pad(lse, (0, max(0, 64 - heads)), value=float("inf"))
        sink = torch.full((stats.shape[1],), float("-inf"), device="cuda")
        given = (wide[0], kv, *wide[1:], stats, sink, idx)
        direct = partial(DSA.sparse_attention_backward_wrapper, *given, softmax_scale=SCALE, topk_length=length)
        peers = {"cuDNN": direct} if wide[0].numel() < 2**31 else {}
        for backend in chosen:
            run = partial(sparse_mla.BACKENDS[backend][1], grad, q, kv, out, lse, idx, length, SCALE)
            grad_q, grad_kv = run()
            errors = {"dq": relative_error(grad_q[sample], reference[0])}
            if len(sample) == rows:
                errors["dkv"] = relative_error(grad_kv, reference[1])
            # The other mode, where there is one, is a peer, too.
            ordered = {"deterministic": partial(run, deterministic=True)} if backend == "tilelang" else {}
            time, measured = compared(run, peers | ordered)
            rate = 2 * heads * length.sum().item() * (3 * WIDTH + 2 * LATENT) / time / 1e9
            yield {
                "backend": backend, "case": name, "ms": time, "tflops": rate, "peers": measured, "check": judge(errors)
            }  # fmt: skip


def dense(chosen: list[str], tokens: list[int]) -> Iterator[dict]:
    """Forward and backward of dense rows: documents of up to index_topk tokens."""
    for total in [n for n in tokens if n <= 32768]:
        cases = {"2048 each": (SLOTS,) * (total // SLOTS), "200-2000": documents_of(total)}
        for name, documents in cases.items():
            edges = torch.tensor((0, *documents)).cumsum(0).tolist()
            segments = [x for a, b in zip(edges, edges[1:], strict=False) for x in (a, b, a, b)]
            q, k, v, grad = (normal(total, HEADS, 256) for _ in range(4))
            out, lse = dense_mla.BACKENDS[chosen[0]][0](q, k, v, segments, SCALE)
            gradients = dense_mla.BACKENDS[chosen[0]][1](grad, q, k, v, out, lse, segments, SCALE)
            few = [x[:, :2].float() for x in (q, k, v)]
            truth = dense_mla.dense_mla_torch(*few, segments, SCALE)
            true_gradients = dense_mla.dense_mla_backward_torch(grad[:, :2].float(), *few, *truth, segments, SCALE)
            errors = {"out": relative_error(out[:, :2], truth[0]), "lse": _same(lse[:, :2], truth[1])}
            pairs = zip(("dq", "dk", "dv"), gradients, true_gradients, strict=True)
            errors |= {name: relative_error(ours[:, :2], theirs) for name, ours, theirs in pairs}

            def run(q=q, k=k, v=v, grad=grad, segments=segments):
                out, lse = dense_mla.BACKENDS[chosen[0]][0](q, k, v, segments, SCALE)
                dense_mla.BACKENDS[chosen[0]][1](grad, q, k, v, out, lse, segments, SCALE)

            time = milliseconds(run)
            operations = 3.5 * 4 * HEADS * 256 * sum(n * (n + 1) // 2 for n in documents)
            yield {
                "backend": chosen[0], "case": f"{total} as {name}, fwd+bwd", "ms": time,
                "tflops": operations / time / 1e9, "peers": {}, "check": judge(errors),
            }  # fmt: skip


def _groups() -> ParallelGroups:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return ParallelGroups.create(ParallelConfig())


def _module(build: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    with torch.device("cuda"):
        module = build().bfloat16()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return module


def attention(chosen: list[str], tokens: list[int]) -> Iterator[dict]:
    """Forward and backward, dense rows auto against off, of an MLA layer and of its core.

    The core starts at queries and latents and ends at the heads' outputs: indexer and absorbed attention, or the
    expansion of the keys and the dense attention, and all copies between them. With cp 2 it has the indexer's kernels
    without its projections.
    """
    config = ModelConfig.from_hf("glm5.2")
    for backend in chosen:
        layer = _module(partial(MLA, RunConfig(config, kernels=KernelConfig(backend)), _groups(), 0))
        for total in [n for n in tokens if n <= 32768]:
            x = normal(total, config.hidden_size).requires_grad_()
            grad = torch.randn_like(x)
            cases = {"200-2000": documents_of(total), "one": (total,), "3/4 and 1/4": (total * 3 // 4, total // 4)}
            for name, documents in cases.items():
                runs, outputs = {}, {}
                for ranks, kind in ((1, "auto"), (1, "off"), (2, "auto"), (2, "off")):
                    pack = PackRows.build(
                        config, documents, total, cp_rank=0, cp_size=ranks, dense_rows=kind, device="cuda"
                    )
                    runs["core", ranks, kind] = _core(layer, pack, x.detach() if ranks == 1 else None)
                    if ranks == 1:
                        runs["layer", ranks, kind] = partial(_backward, layer, grad, x, pack, None)
                        with torch.no_grad():
                            outputs[kind] = layer(x, pack, None)[0]
                # Two results of bf16 kernels differ by more than one differs from fp32.
                check = judge({"out": relative_error(outputs["auto"], outputs["off"]) / 2})
                for part, ranks in (("core", 1), ("layer", 1), ("core", 2)):
                    time, off = compared(runs[part, ranks, "auto"], {"off": runs[part, ranks, "off"]})
                    yield {
                        "backend": backend, "case": f"{total} {name}: {part}{' of cp 2' * (ranks == 2)}", "ms": time,
                        "peers": off, "check": check if ranks == 1 else "",
                    }  # fmt: skip


def _backward(module: torch.nn.Module, grad: Tensor, *inputs: object) -> None:
    module(*inputs)[0].backward(grad)


def _core(layer: MLA, pack: PackRows, x: Tensor | None) -> Callable[[], None]:
    rows = pack.total if pack.local_rows is None else len(pack.local_rows)
    q, kv = normal(rows, HEADS, layer.nope + layer.rope).requires_grad_(), normal(pack.total, WIDTH).requires_grad_()
    select = None
    if pack.sparse is not None and x is not None:
        select = partial(layer.indexer, x, normal(rows, layer.q_a_proj.weight.shape[0]), pack)
    elif pack.sparse is not None:
        scored = row_count(pack.sparse.shard_rows)
        select = partial(_select, pack, layer.backend, normal(scored, 32, 128), normal(pack.total, 128))

    leaves, grad = (q, kv, layer.kv_b_proj.weight), normal(rows, HEADS, layer.value)

    def run():
        out, _ = layer.attend(q, kv, None if select is None else select(), pack)
        torch.autograd.grad(out, leaves, grad)

    return run


def _select(pack: PackRows, backend: str, iq: Tensor, ik: Tensor) -> Tensor:
    sparse, w = pack.sparse, iq[..., 0].float()
    chosen = indexer.index_topk(iq, ik, w, sparse.start, sparse.end, pack.slots, backend, sparse.segments)
    topk = chosen.new_empty(len(pack.local_rows), pack.slots)
    put_rows(topk, sparse.shard_rows, chosen)
    return topk


def experts(chosen: list[str], tokens: list[int]) -> Iterator[dict]:
    """Router, permutation, 32 experts of 6144 x 2048 (top-8) and the weighted sum, against the grouped GEMMs alone."""
    config = ModelConfig.from_hf("glm5.2", n_routed_experts=32)
    groups, dispatcher = _groups(), LocalDispatcher(32)
    router, bank = _module(partial(Router, config, groups)), _module(partial(Experts, config, groups))
    torch.nn.init.zeros_(router.e_score_correction_bias)
    for total in [n for n in tokens if n <= 32768]:
        x = normal(total, config.hidden_size).requires_grad_()
        grad = torch.randn_like(x)

        def layer(x=x):
            ids, weights = router(x, None)
            rows, row_weights, counts, handle = dispatcher.dispatch(x, ids, weights)
            return dispatcher.combine(bank(rows, row_weights, counts), handle)

        ids, weights = router(x, None)
        rows, _, counts, _ = dispatcher.dispatch(x, ids, weights)
        ends = counts.cumsum(0).int()
        rows, hidden = rows.detach().requires_grad_(), normal(len(rows), config.moe_intermediate_size).requires_grad_()
        grads = normal(len(rows), 2 * config.moe_intermediate_size), normal(len(rows), config.hidden_size)

        def gemms(rows=rows, hidden=hidden, ends=ends, grads=grads):
            first = F.grouped_mm(rows, bank.gate_up.transpose(1, 2), offs=ends)
            second = F.grouped_mm(hidden, bank.down.transpose(1, 2), offs=ends)
            torch.autograd.backward((first, second), grads)

        errors = {"out": relative_error(layer()[:SAMPLE], _experts_in_fp32(x[:SAMPLE], ids, weights, bank))}
        time, alone = compared(lambda: layer().backward(grad), {"GEMMs alone": gemms})  # noqa: B023
        operations = 3 * 2 * len(rows) * 3 * config.hidden_size * config.moe_intermediate_size
        yield {
            "backend": "grouped_mm", "case": f"{total} tokens, fwd+bwd", "ms": time, "tflops": operations / time / 1e9,
            "peers": alone, "check": judge(errors),
        }  # fmt: skip


@torch.no_grad()
def _experts_in_fp32(x: Tensor, ids: Tensor, weights: Tensor, bank: Experts) -> Tensor:
    total = torch.zeros(x.shape, device=x.device)
    for expert in range(len(bank.down)):
        token, slot = (ids[: len(x)] == expert).nonzero(as_tuple=True)
        matrices = (m[expert : expert + 1].float() for m in (bank.gate_up, bank.down))
        count = torch.tensor([len(token)], device=x.device)
        total.index_add_(0, token, grouped_mlp(x[token].float(), weights[token, slot], count, *matrices))
    return total


CASES = {
    "index_topk": index_topk,
    "sparse_forward": sparse_forward,
    "sparse_backward": sparse_backward,
    "dense": dense,
    "attention": attention,
    "experts": experts,
}
