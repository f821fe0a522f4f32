"""TileLang forward of sparse MLA on Hopper: two math warpgroups and one that gathers keys."""

from functools import cache

import tilelang.language as T

LATENT, ROPE, WIDTH = 512, 64, 576  # C, R and C + R: the only widths served
HALF = LATENT // 2  # output columns of one math warpgroup
BLOCK = 64  # keys of a block, and heads of a block: the M of wgmma
LOG2E = 1.4426950408889634
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
    def main(
        q: T.Tensor([rows, heads, WIDTH], "bfloat16"),
        kv: T.Tensor([total, WIDTH], "bfloat16"),
        idx: T.Tensor([rows, slots], "int32"),
        length: T.Tensor([rows], "int32"),
        out: T.Tensor([rows, heads, LATENT], "bfloat16"),
        lse: T.Tensor([rows, heads], "float32"),
        scale: T.float32,
    ):
        with T.Kernel(rows * head_blocks, threads=384) as block:
            q_left = T.alloc_shared([BLOCK, HALF], "bfloat16")
            q_right = T.alloc_shared([BLOCK, HALF], "bfloat16")
            q_rope = T.alloc_shared([BLOCK, ROPE], "bfloat16")
            k0_left = T.alloc_shared([BLOCK, HALF], "bfloat16")
            k0_right = T.alloc_shared([BLOCK, HALF], "bfloat16")
            k0_rope = T.alloc_shared([BLOCK, ROPE], "bfloat16")
            k1_left = T.alloc_shared([BLOCK, HALF], "bfloat16")
            k1_right = T.alloc_shared([BLOCK, HALF], "bfloat16")
            k1_rope = T.alloc_shared([BLOCK, ROPE], "bfloat16")
            p_shared = T.alloc_shared([BLOCK, BLOCK], "bfloat16")
            # Running row maxima (base 2) after the even and after the odd block of a pair; row sums at the end.
            max_even = T.alloc_shared([BLOCK], "float32")
            max_odd = T.alloc_shared([BLOCK], "float32")
            sum_even = T.alloc_shared([BLOCK], "float32")
            sum_odd = T.alloc_shared([BLOCK], "float32")
            full0_left = T.alloc_barrier(128)
            full0_right = T.alloc_barrier(128)
            full1_left = T.alloc_barrier(128)
            full1_right = T.alloc_barrier(128)
            free0_left = T.alloc_barrier(128)
            free0_right = T.alloc_barrier(128)
            free1_left = T.alloc_barrier(128)
            free1_right = T.alloc_barrier(128)
            even_ready = T.alloc_barrier(128)
            odd_ready = T.alloc_barrier(128)

            row = T.cast(block // head_blocks, "int64")
            head = block % head_blocks * BLOCK
            thread = T.get_thread_binding()
            count = length[row]
            pairs = T.ceildiv(count, 2 * BLOCK)

            with T.ws(0):
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
                    q_left[h, c] = T.if_then_else(head + h < heads, q[row, head + h, c], 0)
                T.fence_proxy_async()
                T.sync_threads(1, 256)
                T.fill(acc, 0)
                T.fill(row_sum, 0)
                T.fill(row_max, NO_MAX)
                for i in T.serial(pairs):
                    T.barrier_wait(full0_left, i & 1)
                    T.fence_proxy_async()
                    T.wgmma_gemm(q_left, k0_left, s, transpose_B=True, clear_accum=True)
                    T.barrier_wait(full0_right, i & 1)
                    T.fence_proxy_async()
                    T.wgmma_gemm(q_right, k0_right, s, transpose_B=True)
                    T.wgmma_gemm(q_rope, k0_rope, s, transpose_B=True)
                    T.wait_wgmma(0)
                    for h, u in T.Parallel(BLOCK, BLOCK):
                        s[h, u] = T.if_then_else(
                            i * 2 * BLOCK + u < count, s[h, u] * (scale * LOG2E), -T.infinity("float32")
                        )
                    T.copy(row_max, previous)
                    T.reduce_max(s, row_max, dim=1, clear=False)
                    for h in T.Parallel(BLOCK):
                        alpha[h] = T.exp2(previous[h] - row_max[h])
                    for h, u in T.Parallel(BLOCK, BLOCK):
                        s[h, u] = T.exp2(s[h, u] - row_max[h])
                    T.copy(s, p)
                    T.copy(p, p_shared)
                    T.copy(row_max, max_even)
                    T.fence_proxy_async()
                    T.barrier_arrive(even_ready)
                    for h, c in T.Parallel(BLOCK, HALF):
                        acc[h, c] *= alpha[h]
                    T.wgmma_gemm(p, k0_left, acc)
                    T.reduce_sum(s, block_sum, dim=1)
                    for h in T.Parallel(BLOCK):
                        row_sum[h] = row_sum[h] * alpha[h] + block_sum[h]
                    T.wait_wgmma(0)
                    T.barrier_arrive(free0_left)

                    T.barrier_wait(odd_ready, i & 1)
                    T.copy(row_max, previous)
                    T.copy(max_odd, row_max)
                    for h in T.Parallel(BLOCK):
                        alpha[h] = T.exp2(previous[h] - row_max[h])
                        row_sum[h] *= alpha[h]
                    for h, c in T.Parallel(BLOCK, HALF):
                        acc[h, c] *= alpha[h]
                    T.wgmma_gemm(p_shared, k1_left, acc)
                    T.wait_wgmma(0)
                    T.barrier_arrive(free1_left)

                T.copy(row_sum, sum_even)
                T.sync_threads(1, 256)
                for h in T.Parallel(BLOCK):
                    row_sum[h] += sum_odd[h]
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

            with T.ws(1):
                T.set_max_nreg(240, 1)
                acc1 = T.alloc_fragment([BLOCK, HALF], "float32")
                s1 = T.alloc_fragment([BLOCK, BLOCK], "float32")
                p1 = T.alloc_fragment([BLOCK, BLOCK], "bfloat16")
                row_max1 = T.alloc_fragment([BLOCK], "float32")
                previous1 = T.alloc_fragment([BLOCK], "float32")
                alpha1 = T.alloc_fragment([BLOCK], "float32")
                row_sum1 = T.alloc_fragment([BLOCK], "float32")
                block_sum1 = T.alloc_fragment([BLOCK], "float32")
                for h, c in T.Parallel(BLOCK, HALF):
                    q_right[h, c] = T.if_then_else(head + h < heads, q[row, head + h, HALF + c], 0)
                for h, c in T.Parallel(BLOCK, ROPE):
                    q_rope[h, c] = T.if_then_else(head + h < heads, q[row, head + h, LATENT + c], 0)
                T.fence_proxy_async()
                T.sync_threads(1, 256)
                T.fill(acc1, 0)
                T.fill(row_sum1, 0)
                T.fill(row_max1, NO_MAX)
                for i in T.serial(pairs):
                    T.barrier_wait(full1_left, i & 1)
                    T.fence_proxy_async()
                    T.wgmma_gemm(q_left, k1_left, s1, transpose_B=True, clear_accum=True)
                    T.barrier_wait(full1_right, i & 1)
                    T.fence_proxy_async()
                    T.wgmma_gemm(q_right, k1_right, s1, transpose_B=True)
                    T.wgmma_gemm(q_rope, k1_rope, s1, transpose_B=True)
                    T.wait_wgmma(0)
                    for h, u in T.Parallel(BLOCK, BLOCK):
                        s1[h, u] = T.if_then_else(
                            (i * 2 + 1) * BLOCK + u < count, s1[h, u] * (scale * LOG2E), -T.infinity("float32")
                        )

                    T.barrier_wait(even_ready, i & 1)
                    T.copy(row_max1, previous1)
                    T.copy(max_even, row_max1)
                    for h in T.Parallel(BLOCK):
                        alpha1[h] = T.exp2(previous1[h] - row_max1[h])
                        row_sum1[h] *= alpha1[h]
                    for h, c in T.Parallel(BLOCK, HALF):
                        acc1[h, c] *= alpha1[h]
                    T.wgmma_gemm(p_shared, k0_right, acc1)
                    # This softmax hides behind the product of the even block.
                    T.copy(row_max1, previous1)
                    T.reduce_max(s1, row_max1, dim=1, clear=False)
                    for h in T.Parallel(BLOCK):
                        alpha1[h] = T.exp2(previous1[h] - row_max1[h])
                    for h, u in T.Parallel(BLOCK, BLOCK):
                        s1[h, u] = T.exp2(s1[h, u] - row_max1[h])
                    T.reduce_sum(s1, block_sum1, dim=1)
                    for h in T.Parallel(BLOCK):
                        row_sum1[h] = row_sum1[h] * alpha1[h] + block_sum1[h]
                    T.copy(s1, p1)
                    T.wait_wgmma(0)
                    T.barrier_arrive(free0_right)
                    T.copy(p1, p_shared)
                    T.copy(row_max1, max_odd)
                    T.fence_proxy_async()
                    T.barrier_arrive(odd_ready)
                    for h, c in T.Parallel(BLOCK, HALF):
                        acc1[h, c] *= alpha1[h]
                    T.wgmma_gemm(p1, k1_right, acc1)
                    T.wait_wgmma(0)
                    T.barrier_arrive(free1_right)

                T.copy(row_sum1, sum_odd)
                T.sync_threads(1, 256)
                for h in T.Parallel(BLOCK):
                    row_sum1[h] += sum_even[h]
                    alpha1[h] = T.if_then_else(row_sum1[h] == 0, 0.0, 1.0 / row_sum1[h])
                for h, c in T.Parallel(BLOCK, HALF):
                    acc1[h, c] *= alpha1[h]
                for h, c in T.Parallel(BLOCK, HALF):
                    if head + h < heads:
                        out[row, head + h, HALF + c] = acc1[h, c]

            with T.ws(2):
                T.set_max_nreg(24, 0)
                lane = (thread - 256) // 8  # eight threads a key, 16 bytes each: one swizzle row of 128 bytes
                column = (thread - 256) % 8 * 8
                key = T.alloc_local([4], "int32")
                for i in T.serial(pairs):
                    for r in T.unroll(4):
                        slot = i * 2 * BLOCK + r * 16 + lane
                        key[r] = -1
                        if slot < count:
                            key[r] = idx[row, slot]
                    T.barrier_wait(free0_left, (i & 1) ^ 1)
                    gather(kv, key, k0_left, 0, HALF, lane, column)
                    T.cp_async_barrier_noinc(full0_left)
                    T.barrier_wait(free0_right, (i & 1) ^ 1)
                    gather(kv, key, k0_right, HALF, HALF, lane, column)
                    gather(kv, key, k0_rope, LATENT, ROPE, lane, column)
                    T.cp_async_barrier_noinc(full0_right)
                    for r in T.unroll(4):
                        slot = (i * 2 + 1) * BLOCK + r * 16 + lane
                        key[r] = -1
                        if slot < count:
                            key[r] = idx[row, slot]
                    T.barrier_wait(free1_left, (i & 1) ^ 1)
                    gather(kv, key, k1_left, 0, HALF, lane, column)
                    T.cp_async_barrier_noinc(full1_left)
                    T.barrier_wait(free1_right, (i & 1) ^ 1)
                    gather(kv, key, k1_right, HALF, HALF, lane, column)
                    gather(kv, key, k1_rope, LATENT, ROPE, lane, column)
                    T.cp_async_barrier_noinc(full1_right)

    return main
