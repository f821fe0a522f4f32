"""TileLang forward of sparse MLA on Hopper: two math warpgroups and one that gathers keys."""

# pyright: reportInvalidTypeForm=false
# TileLang reads shapes of buffers from annotations.

from functools import cache
from types import SimpleNamespace

import tilelang.language as T

LATENT, ROPE, WIDTH = 512, 64, 576  # C, R and C + R: the only widths served
HALF = LATENT // 2  # output columns of one math warpgroup
BLOCK = 64  # keys of a block, and heads of a block: the M of wgmma
LOG2E = 1.4426950408889634
MAX_EVEN, MAX_ODD, SUM_EVEN, SUM_ODD = range(4)  # rows of the statistics in shared memory
NO_MAX = -(2.0**60)  # below every score, yet finite: the difference of two is never NaN


@T.macro
def gather(kv, key, destination, first, width, lane, column):
    """Issue the copies of this thread's four keys into `destination` [64, width]; a key -1 becomes zeros."""
    for item in T.unroll(4 * (width // 64)):
        r, chunk = item // (width // 64), item % (width // 64)
        T.ptx_cp_async(
            T.access_ptr(destination[r * 16 + lane, chunk * 64 + column], "w", 8),
            T.access_ptr(kv[T.cast(T.max(key[r], 0), "int64"), first + chunk * 64 + column], "r", 8),
            8,
            key[r] >= 0,
        )


def shared_buffers() -> SimpleNamespace:
    """Shared memory of a thread block (227 KB) and its barriers; "0" and "1" are the even and the odd block of keys."""
    wide = ("q_left", "q_right", "k0_left", "k0_right", "k1_left", "k1_right")
    tiles = {name: T.alloc_shared([BLOCK, HALF], "bfloat16") for name in wide}
    tiles |= {name: T.alloc_shared([BLOCK, ROPE], "bfloat16") for name in ("q_rope", "k0_rope", "k1_rope", "p_shared")}
    # Running row maxima (base 2) after the even and after the odd block of a pair, and their row sums at the end. In
    # one buffer: each would be aligned as the tiles are, and there is no room for that.
    tiles["stats"] = T.alloc_shared([4, BLOCK], "float32")
    halves = ("full0_left", "full0_right", "full1_left", "full1_right")
    halves += ("free0_left", "free0_right", "free1_left", "free1_right")
    barriers = {name: T.alloc_barrier(128) for name in (*halves, "even_ready", "odd_ready")}
    return SimpleNamespace(**tiles, **barriers)


@T.macro
def even_warpgroup(b, q, out, lse, row, head, heads, count, scale):
    """Scores of the even blocks; left half of the output; lse."""
    T.set_max_nreg(240, 1)
    acc = T.alloc_fragment([BLOCK, HALF], "float32")
    s = T.alloc_fragment([BLOCK, BLOCK], "float32")
    p = T.alloc_fragment([BLOCK, BLOCK], "bfloat16")
    row_max = T.alloc_fragment([BLOCK], "float32")
    previous = T.alloc_fragment([BLOCK], "float32")
    alpha = T.alloc_fragment([BLOCK], "float32")
    row_sum = T.alloc_fragment([BLOCK], "float32")
    block_sum = T.alloc_fragment([BLOCK], "float32")
    for h, c in T.Parallel(BLOCK, HALF):
        b.q_left[h, c] = T.if_then_else(head + h < heads, q[row, head + h, c], 0)
    T.fence_proxy_async()
    T.sync_threads(1, 256)
    T.fill(acc, 0)
    T.fill(row_sum, 0)
    T.fill(row_max, NO_MAX)
    for i in T.serial(T.ceildiv(count, 2 * BLOCK)):
        T.barrier_wait(b.full0_left, i & 1)
        T.fence_proxy_async()
        T.wgmma_gemm(b.q_left, b.k0_left, s, transpose_B=True, clear_accum=True)
        T.barrier_wait(b.full0_right, i & 1)
        T.fence_proxy_async()
        T.wgmma_gemm(b.q_right, b.k0_right, s, transpose_B=True)
        T.wgmma_gemm(b.q_rope, b.k0_rope, s, transpose_B=True)
        T.wait_wgmma(0)
        for h, u in T.Parallel(BLOCK, BLOCK):
            s[h, u] = T.if_then_else(i * 2 * BLOCK + u < count, s[h, u] * (scale * LOG2E), -T.infinity("float32"))
        T.copy(row_max, previous)
        T.reduce_max(s, row_max, dim=1, clear=False)
        for h in T.Parallel(BLOCK):
            alpha[h] = T.exp2(previous[h] - row_max[h])
        for h, u in T.Parallel(BLOCK, BLOCK):
            s[h, u] = T.exp2(s[h, u] - row_max[h])
        T.copy(s, p)
        T.copy(p, b.p_shared)
        T.copy(row_max, b.stats[MAX_EVEN, :])
        T.fence_proxy_async()
        T.barrier_arrive(b.even_ready)
        for h, c in T.Parallel(BLOCK, HALF):
            acc[h, c] *= alpha[h]
        T.wgmma_gemm(p, b.k0_left, acc)
        T.reduce_sum(s, block_sum, dim=1)
        for h in T.Parallel(BLOCK):
            row_sum[h] = row_sum[h] * alpha[h] + block_sum[h]
        T.wait_wgmma(0)
        T.barrier_arrive(b.free0_left)

        T.barrier_wait(b.odd_ready, i & 1)
        T.copy(row_max, previous)
        T.copy(b.stats[MAX_ODD, :], row_max)
        for h in T.Parallel(BLOCK):
            alpha[h] = T.exp2(previous[h] - row_max[h])
            row_sum[h] *= alpha[h]
        for h, c in T.Parallel(BLOCK, HALF):
            acc[h, c] *= alpha[h]
        T.wgmma_gemm(b.p_shared, b.k1_left, acc)
        T.wait_wgmma(0)
        T.barrier_arrive(b.free1_left)

    T.copy(row_sum, b.stats[SUM_EVEN, :])
    T.sync_threads(1, 256)
    for h in T.Parallel(BLOCK):
        row_sum[h] += b.stats[SUM_ODD, h]
        # Rows without a key keep sum 0: their output is 0 and their lse -inf.
        alpha[h] = T.if_then_else(row_sum[h] == 0, 0.0, 1.0 / row_sum[h])
        if head + h < heads:
            lse[row, head + h] = T.if_then_else(
                row_sum[h] == 0, -T.infinity("float32"), (row_max[h] + T.log2(row_sum[h])) / LOG2E
            )
    for h, c in T.Parallel(BLOCK, HALF):
        acc[h, c] *= alpha[h]
    for h, c in T.Parallel(BLOCK, HALF):
        if head + h < heads:
            out[row, head + h, c] = acc[h, c]


@T.macro
def odd_warpgroup(b, q, out, row, head, heads, count, scale):
    """Scores of the odd blocks; right half of the output."""
    T.set_max_nreg(240, 1)
    acc = T.alloc_fragment([BLOCK, HALF], "float32")
    s = T.alloc_fragment([BLOCK, BLOCK], "float32")
    p = T.alloc_fragment([BLOCK, BLOCK], "bfloat16")
    row_max = T.alloc_fragment([BLOCK], "float32")
    previous = T.alloc_fragment([BLOCK], "float32")
    alpha = T.alloc_fragment([BLOCK], "float32")
    row_sum = T.alloc_fragment([BLOCK], "float32")
    block_sum = T.alloc_fragment([BLOCK], "float32")
    for h, c in T.Parallel(BLOCK, HALF):
        b.q_right[h, c] = T.if_then_else(head + h < heads, q[row, head + h, HALF + c], 0)
    for h, c in T.Parallel(BLOCK, ROPE):
        b.q_rope[h, c] = T.if_then_else(head + h < heads, q[row, head + h, LATENT + c], 0)
    T.fence_proxy_async()
    T.sync_threads(1, 256)
    T.fill(acc, 0)
    T.fill(row_sum, 0)
    T.fill(row_max, NO_MAX)
    for i in T.serial(T.ceildiv(count, 2 * BLOCK)):
        T.barrier_wait(b.full1_left, i & 1)
        T.fence_proxy_async()
        T.wgmma_gemm(b.q_left, b.k1_left, s, transpose_B=True, clear_accum=True)
        T.barrier_wait(b.full1_right, i & 1)
        T.fence_proxy_async()
        T.wgmma_gemm(b.q_right, b.k1_right, s, transpose_B=True)
        T.wgmma_gemm(b.q_rope, b.k1_rope, s, transpose_B=True)
        T.wait_wgmma(0)
        for h, u in T.Parallel(BLOCK, BLOCK):
            s[h, u] = T.if_then_else((i * 2 + 1) * BLOCK + u < count, s[h, u] * (scale * LOG2E), -T.infinity("float32"))

        T.barrier_wait(b.even_ready, i & 1)
        T.copy(row_max, previous)
        T.copy(b.stats[MAX_EVEN, :], row_max)
        for h in T.Parallel(BLOCK):
            alpha[h] = T.exp2(previous[h] - row_max[h])
            row_sum[h] *= alpha[h]
        for h, c in T.Parallel(BLOCK, HALF):
            acc[h, c] *= alpha[h]
        T.wgmma_gemm(b.p_shared, b.k0_right, acc)
        # This softmax hides behind the product of the even block.
        T.copy(row_max, previous)
        T.reduce_max(s, row_max, dim=1, clear=False)
        for h in T.Parallel(BLOCK):
            alpha[h] = T.exp2(previous[h] - row_max[h])
        for h, u in T.Parallel(BLOCK, BLOCK):
            s[h, u] = T.exp2(s[h, u] - row_max[h])
        T.reduce_sum(s, block_sum, dim=1)
        for h in T.Parallel(BLOCK):
            row_sum[h] = row_sum[h] * alpha[h] + block_sum[h]
        T.copy(s, p)
        T.wait_wgmma(0)
        T.barrier_arrive(b.free0_right)
        T.copy(p, b.p_shared)
        T.copy(row_max, b.stats[MAX_ODD, :])
        T.fence_proxy_async()
        T.barrier_arrive(b.odd_ready)
        for h, c in T.Parallel(BLOCK, HALF):
            acc[h, c] *= alpha[h]
        T.wgmma_gemm(p, b.k1_right, acc)
        T.wait_wgmma(0)
        T.barrier_arrive(b.free1_right)

    T.copy(row_sum, b.stats[SUM_ODD, :])
    T.sync_threads(1, 256)
    for h in T.Parallel(BLOCK):
        row_sum[h] += b.stats[SUM_EVEN, h]
        alpha[h] = T.if_then_else(row_sum[h] == 0, 0.0, 1.0 / row_sum[h])
    for h, c in T.Parallel(BLOCK, HALF):
        acc[h, c] *= alpha[h]
    for h, c in T.Parallel(BLOCK, HALF):
        if head + h < heads:
            out[row, head + h, HALF + c] = acc[h, c]


@T.macro
def gather_warpgroup(b, kv, idx, row, count, thread):
    """Copies of the pairs of key blocks, as their halves become free."""
    T.set_max_nreg(24, 0)
    lane = (thread - 256) // 8  # eight threads a key, 16 bytes each: one swizzle row of 128 bytes
    column = (thread - 256) % 8 * 8
    key = T.alloc_local([4], "int32")
    for i in T.serial(T.ceildiv(count, 2 * BLOCK)):
        for r in T.unroll(4):
            slot = i * 2 * BLOCK + r * 16 + lane
            key[r] = -1
            if slot < count:
                key[r] = idx[row, slot]
        T.barrier_wait(b.free0_left, (i & 1) ^ 1)
        gather(kv, key, b.k0_left, 0, HALF, lane, column)
        T.cp_async_barrier_noinc(b.full0_left)
        T.barrier_wait(b.free0_right, (i & 1) ^ 1)
        gather(kv, key, b.k0_right, HALF, HALF, lane, column)
        gather(kv, key, b.k0_rope, LATENT, ROPE, lane, column)
        T.cp_async_barrier_noinc(b.full0_right)
        for r in T.unroll(4):
            slot = (i * 2 + 1) * BLOCK + r * 16 + lane
            key[r] = -1
            if slot < count:
                key[r] = idx[row, slot]
        T.barrier_wait(b.free1_left, (i & 1) ^ 1)
        gather(kv, key, b.k1_left, 0, HALF, lane, column)
        T.cp_async_barrier_noinc(b.full1_left)
        T.barrier_wait(b.free1_right, (i & 1) ^ 1)
        gather(kv, key, b.k1_right, HALF, HALF, lane, column)
        gather(kv, key, b.k1_rope, LATENT, ROPE, lane, column)
        T.cp_async_barrier_noinc(b.full1_right)


@cache
def forward_kernel(heads: int):
    """Compile for `heads` local heads; rows, pack length, slots and scale stay dynamic.

    One thread block serves one query row and 64 heads. Keys come in pairs of blocks of 64, one buffer each. Both
    math warpgroups (threads 0-127 and 128-255) walk the blocks in the same order and own one half of the output
    columns; the scores of the even block are computed by the first, those of the odd block by the second, which
    hand their probabilities over through shared memory. So one computes a softmax while the other feeds the
    tensor cores. Threads 256-383 gather: cp.async straight into the swizzled layout of wgmma. Each buffer is
    released in halves, so that a block is refilled while the other one is in use.
    """
    rows, total, slots = T.dynamic("rows"), T.dynamic("total"), T.dynamic("slots")
    head_blocks = -(-heads // BLOCK)

    @T.prim_func
    def sparse_mla_forward(
        q: T.Tensor([rows, heads, WIDTH], "bfloat16"),
        kv: T.Tensor([total, WIDTH], "bfloat16"),
        idx: T.Tensor([rows, slots], "int32"),
        length: T.Tensor([rows], "int32"),
        out: T.Tensor([rows, heads, LATENT], "bfloat16"),
        lse: T.Tensor([rows, heads], "float32"),
        scale: T.float32,
    ):
        with T.Kernel(rows * head_blocks, threads=384) as block:
            b = shared_buffers()
            row = T.cast(block // head_blocks, "int64")
            head = block % head_blocks * BLOCK
            thread = T.get_thread_binding()
            count = length[row]
            with T.ws(0):
                even_warpgroup(b, q, out, lse, row, head, heads, count, scale)
            with T.ws(1):
                odd_warpgroup(b, q, out, row, head, heads, count, scale)
            with T.ws(2):
                gather_warpgroup(b, kv, idx, row, count, thread)

    return sparse_mla_forward
