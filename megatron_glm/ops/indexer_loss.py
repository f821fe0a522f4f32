"""The loss that trains an indexer: how far its choice of keys is from where the attention looks.

For each query row, the teacher p is the attention's probability of each key, averaged over the heads; the student q is
the softmax of the indexer's scores over the same keys. The loss of a row is KL(p || q) = sum_u p log(p / q), and its
gradient by the scores is q - p: it is computed in that form, since -p / (q + eps) loses small q.

h heads, Hi index heads, Di their size; `w` has every positive scale folded in, as in `ops.indexer`. What has no key (a
slot of -1, a row of padding) has p = 0 and adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megatron_glm.ops.rows import add_rows

CHUNK_BYTES = 1 << 30  # of all fp32 [rows, keys] arrays that exist at a time
ARRAYS = 8  # so many of them: teacher, scores, log-probabilities, gradient, and a head's products
CHUNK_ROWS = 1024  # at most, because their queries in the latent space, 72 KB a row of GLM-5.2, exist beside the arrays
BLOCK_ELEMENTS = 1 << 24  # fp32 elements of gathered keys, or of the products of some heads: 64 MiB


def attention_mass(q: Tensor, kv: Tensor, idx: Tensor, lse: Tensor, scale: float, backend: str) -> Tensor:
    """Attention probabilities of the selected keys, summed over the heads: the teacher times h. No gradient.

    Args:
        q: [n, h, C+R] absorbed queries; kv: [T, C+R] latents.
        idx: [n, K] int32 rows of kv, -1 in unused slots at the tail.
        lse: [n, h] fp32, natural logarithm of the sum over these keys.
    Returns:
        [n, K] fp32; 0 in unused slots.
    """
    return BACKENDS[backend][0](q.detach(), kv.detach(), idx, lse.detach(), scale)


def student_log_probs(iq: Tensor, ik: Tensor, w: Tensor, idx: Tensor, backend: str) -> Tensor:
    """Logarithm of the student's probability of the selected keys, differentiable in iq, ik and w.

    Args:
        iq: [n, Hi, Di]; ik: [T, Di]; w: [n, Hi] fp32; idx: [n, K] int32, -1 in unused slots.
    Returns:
        [n, K] fp32; 0 in unused slots.
    """
    return _Student.apply(iq, ik, w, idx, backend)


def selected_kl(log_probs: Tensor, teacher: Tensor, coefficient: float) -> Tensor:
    """Sum of the KL over rows of selected keys: log_probs and teacher [n, K] fp32 -> fp32 scalar.

    The gradient, and not the value, has the coefficient. It is linear in log_probs: where several layers teach one
    student, autograd adds their teachers up.
    """
    return _SelectedKL.apply(log_probs, teacher, coefficient)


class _Student(torch.autograd.Function):
    @staticmethod
    def forward(ctx, iq: Tensor, ik: Tensor, w: Tensor, idx: Tensor, backend: str) -> Tensor:
        log_probs = BACKENDS[backend][1](iq, ik, w, idx)
        ctx.save_for_backward(iq, ik, w, idx, log_probs)
        ctx.backend = backend
        return log_probs

    @staticmethod
    def backward(ctx, grad: Tensor):
        return *BACKENDS[ctx.backend][2](grad, *ctx.saved_tensors), None, None


class _SelectedKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, log_probs: Tensor, teacher: Tensor, coefficient: float) -> Tensor:
        ctx.save_for_backward(teacher)
        ctx.coefficient = coefficient
        return (torch.special.xlogy(teacher, teacher) - teacher * log_probs).sum()

    @staticmethod
    def backward(ctx, grad: Tensor):
        (teacher,) = ctx.saved_tensors
        return teacher * (-ctx.coefficient * grad), None, None


def _blocks(idx: Tensor, keys: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Blocks of rows, with their slots as rows of `keys`, which slots are used, and the gathered keys in fp32."""
    step = max(1, BLOCK_ELEMENTS // max(1, idx.shape[1] * keys.shape[1]))
    for begin in range(0, idx.shape[0], step):
        rows = slice(begin, begin + step)
        used = idx[rows] >= 0
        index = idx[rows].long().clamp(min=0)
        yield rows, index, used, keys[index].float()


def attention_mass_torch(q: Tensor, kv: Tensor, idx: Tensor, lse: Tensor, scale: float) -> Tensor:
    mass = torch.empty(idx.shape, dtype=torch.float32, device=idx.device)
    for rows, _, used, keys in _blocks(idx, kv):
        scores = (q[rows].float() @ keys.transpose(1, 2)) * scale
        mass[rows] = (scores - lse[rows].unsqueeze(-1)).exp().sum(1).masked_fill(~used, 0.0)
    return mass


def student_log_probs_torch(iq: Tensor, ik: Tensor, w: Tensor, idx: Tensor) -> Tensor:
    log_probs = torch.empty(idx.shape, dtype=torch.float32, device=idx.device)
    for rows, _, used, keys in _blocks(idx, ik):
        per_head = torch.relu(iq[rows].float() @ keys.transpose(1, 2))
        scores = (w[rows].unsqueeze(1) @ per_head).squeeze(1).masked_fill(~used, float("-inf"))
        log_probs[rows] = scores.log_softmax(-1).masked_fill(~used, 0.0)  # a row without keys is NaN before this
    return log_probs


def student_backward_torch(
    grad: Tensor, iq: Tensor, ik: Tensor, w: Tensor, idx: Tensor, log_probs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grad_q, grad_w = torch.empty_like(iq), torch.empty_like(w)
    grad_k = torch.zeros(ik.shape, dtype=torch.float32, device=ik.device)
    for rows, index, used, keys in _blocks(idx, ik):
        given = grad[rows].masked_fill(~used, 0.0)
        grad_scores = given - log_probs[rows].exp().masked_fill(~used, 0.0) * given.sum(-1, keepdim=True)
        queries = iq[rows].float()
        products = queries @ keys.transpose(1, 2)  # [n, Hi, K]
        grad_w[rows] = (torch.relu(products) @ grad_scores.unsqueeze(-1)).squeeze(-1)
        grad_products = grad_scores.unsqueeze(1) * w[rows].unsqueeze(-1) * (products > 0)
        grad_q[rows] = (grad_products @ keys).to(iq.dtype)
        grad_keys = (grad_products.transpose(1, 2) @ queries).flatten(0, 1)
        add_rows(grad_k, index.flatten(), grad_keys)
    return grad_q, grad_k.to(ik.dtype), grad_w


# teacher, student, and the student's backward: (grad, iq, ik, w, idx, log_probs) -> gradients of iq, ik, w
BACKENDS: dict[str, tuple[Callable, Callable, Callable]] = {
    "torch": (attention_mass_torch, student_log_probs_torch, student_backward_torch)
}


# ---- over all causal keys: dense warm-up ---------------------------------------------------------------------------

Chunk = tuple[int, int, int, int]  # row begin, row end, key begin, key end


def key_chunks(start: Tensor, end: Tensor) -> list[Chunk]:
    """Runs of at most CHUNK_ROWS [ranks, rows] whose arrays [ranks, rows, keys] stay within CHUNK_BYTES.

    Args:
        start, end: [ranks, rows] int64 on the host, the keys that each row sees, of all ranks that share the heads:
            they work on the same chunks. Its keys are those that any of its rows sees; a chunk without any is left out.
    """
    ranks, rows = start.shape
    seen = end > start
    first = start.masked_fill(~seen, torch.iinfo(torch.int64).max).amin(0)
    last = end.masked_fill(~seen, 0).amax(0)
    chunks, begin = [], 0
    while begin < rows:
        size = min(rows - begin, max(1, CHUNK_ROWS // ranks))
        while True:
            part = slice(begin, begin + size)
            key, key_end = int(first[part].min()), int(last[part].max())
            if size == 1 or ranks * size * (key_end - key) * 4 * ARRAYS <= CHUNK_BYTES:
                break
            size = -(-size // 2)
        if key < key_end:
            chunks.append((begin, begin + size, key, key_end))
        begin += size
    return chunks


def dense_kl(
    iq: Tensor,
    ik: Tensor,
    w: Tensor,
    start: Tensor,
    end: Tensor,
    chunks: Sequence[Chunk],
    teacher: Callable[[Chunk], Tensor],
    coefficient: float,
    slots: int,
) -> tuple[Tensor, Tensor]:
    """Sums over the rows of the KL over all keys that they see, differentiable in iq, ik and w, and of `recalled`.

    Value and gradients are computed together, chunk by chunk. The gradient, and not the value, has the coefficient.

    Args:
        iq: [n, Hi, Di]; ik: [T, Di]; w: [n, Hi] fp32; start, end: [n] int32, the keys that a row sees.
        chunks: see `key_chunks`.
        teacher: gives p [rows, keys] fp32 of a chunk, 0 where a row does not see a key. It may communicate.
        slots: K, the keys that a row will select.
    Returns:
        two fp32 scalars.
    """
    return _DenseKL.apply(iq, ik, w, start, end, chunks, teacher, coefficient, slots)


def recalled(p: Tensor, scores: Tensor, seen: Tensor, slots: int) -> Tensor:
    """How much of the attention a selection would keep: p on the keys of the highest scores, over p on its own highest.

    Args:
        p: [n, u] fp32; scores: [n, u], -inf where a row does not see a key; seen: [n], keys that a row sees.
        slots: K, keys that are selected.
    Returns:
        fp32 scalar: the sum over the rows that see more than K keys of these shares, each from 0 to 1.
    """
    if p.shape[1] <= slots:
        return torch.zeros((), device=p.device)
    kept = p.gather(1, scores.topk(slots, sorted=False).indices).sum(1)
    most = p.topk(slots, sorted=False).values.sum(1)
    return torch.where(seen > slots, kept / most, 0.0).sum()


class _DenseKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, iq, ik, w, start, end, chunks, teacher, coefficient, slots):
        loss, recall = torch.zeros((), device=iq.device), torch.zeros((), device=iq.device)
        # A row's queries and weights get their gradients from one chunk, a key from many: its are summed in fp32.
        grads = [torch.zeros_like(iq), torch.zeros(ik.shape, device=ik.device), torch.zeros_like(w)]
        for chunk in chunks:
            rows, keys = slice(*chunk[:2]), slice(*chunk[2:])
            p, visible = teacher(chunk), visible_keys(start[rows], end[rows], keys)
            scores = _dense_scores(iq[rows], ik[keys], w[rows]).masked_fill_(~visible, float("-inf"))
            recall += recalled(p, scores, end[rows] - start[rows], slots)
            log_probs = scores.log_softmax(-1).masked_fill_(~visible, 0.0)
            loss += (torch.special.xlogy(p, p) - p * log_probs).sum()
            grad_scores = log_probs.exp_().masked_fill_(~visible, 0.0).mul_(p.sum(-1, keepdim=True)).sub_(p)
            _add_dense_gradients(grads, rows, keys, grad_scores, iq, ik, w)
        ctx.gradients = [grad.to(x.dtype) for grad, x in zip(grads, (iq, ik, w), strict=True)]
        ctx.coefficient = coefficient
        ctx.mark_non_differentiable(recall)
        return loss, recall

    @staticmethod
    def backward(ctx, grad: Tensor, _: Tensor):
        factor = ctx.coefficient * grad
        gradients = [x * factor.to(x.dtype) for x in ctx.gradients]
        del ctx.gradients
        return *gradients, None, None, None, None, None, None


def visible_keys(start: Tensor, end: Tensor, keys: slice) -> Tensor:
    """[n, keys] bool: which of these pack positions a row sees, whose keys are start to end, [n] int32 each."""
    position = torch.arange(keys.start, keys.stop, device=start.device, dtype=torch.int32)
    return (position >= start.unsqueeze(1)) & (position < end.unsqueeze(1))


def dense_mass(q: Tensor, kv: Tensor, lse: Tensor, visible: Tensor, scale: float) -> Tensor:
    """`attention_mass` of all visible keys: q [n, h, C+R], kv [u, C+R], lse [n, h], visible [n, u] -> [n, u] fp32."""
    mass = torch.zeros(visible.shape, dtype=torch.float32, device=q.device)
    for part in _head_blocks(q.shape[1], visible.numel()):
        scores = _products(q[:, part], kv).mul_(scale)
        mass += scores.sub_(lse[:, part].T.unsqueeze(-1)).exp_().sum(0)
    return mass.masked_fill_(~visible, 0.0)


def _dense_scores(iq: Tensor, ik: Tensor, w: Tensor) -> Tensor:
    """The indexer's scores [n, u] fp32."""
    scores = torch.zeros(iq.shape[0], ik.shape[0], device=iq.device)
    for part in _head_blocks(iq.shape[1], scores.numel()):
        scores += _products(iq[:, part], ik).relu_().mul_(w[:, part].T.unsqueeze(-1)).sum(0)
    return scores


def _add_dense_gradients(
    grads: list[Tensor], rows: slice, keys: slice, grad_scores: Tensor, iq: Tensor, ik: Tensor, w: Tensor
) -> None:
    """Adds what the gradient of a chunk's scores [n, u] gives iq, ik and w."""
    queries, index_keys = iq[rows], ik[keys]
    for part in _head_blocks(iq.shape[1], grad_scores.numel()):
        products = _products(queries[:, part], index_keys)  # [heads, n, u]
        grads[2][rows, part] = (products.relu() * grad_scores).sum(-1).T
        grad_products = (products > 0) * grad_scores * w[rows, part].T.unsqueeze(-1)
        grads[0][rows, part] = (grad_products @ index_keys.float()).transpose(0, 1)
        grads[1][keys] += grad_products.flatten(0, 1).T @ queries[:, part].transpose(0, 1).flatten(0, 1).float()


def _head_blocks(heads: int, elements: int) -> Iterator[slice]:
    """Runs of heads whose [rows, keys] arrays of `elements` fit a block; one head at least."""
    step = max(1, BLOCK_ELEMENTS // max(1, elements))
    for begin in range(0, heads, step):
        yield slice(begin, min(begin + step, heads))


def _products(x: Tensor, keys: Tensor) -> Tensor:
    """x [n, h, d] with keys [u, d] -> [h, n, u] fp32."""
    flat = x.transpose(0, 1).reshape(-1, x.shape[-1])
    if flat.is_cuda and flat.dtype == torch.bfloat16:
        product = torch.mm(flat, keys.T, out_dtype=torch.float32)
    else:
        product = flat.float() @ keys.float().T
    return product.view(x.shape[1], x.shape[0], -1)
