"""TileLang backward of sparse MLA on Hopper: scores once, dQ in registers, dKV added to memory as it is made."""

from functools import cache

import tilelang.language as T

from megatron_glm.ops.tilelang.sparse_forward import BLOCK, HALF, LATENT, LOG2E, ROPE, WIDTH, gather

# Adds `part`, the wgmma accumulator [64 keys, 64 columns] of one warpgroup, to the rows of its keys. Thread t holds
# columns 8 j + 2 q and 8 j + 2 q + 1, q = t % 4, of key rows 16 (t / 32) + (t % 32) / 4 and 8 further.
# fp32: neighbours exchange, so that each has four columns of one row, for one 16-byte addition.
# 64-bit fixed point, whose sums do not depend on the order of the additions because integer addition is associative:
# the four threads of a row exchange, so that one instruction adds columns 0 to 3 (or 4 to 7) of it, 32 bytes.
HELPERS = """
__device__ __forceinline__ void add_tile(const float *part, float *sums, const int *keys, int used, float) {
  const int lane = threadIdx.x % 32, odd = lane % 2;
  const int slot = threadIdx.x % 128 / 32 * 16 + lane / 4 + odd * 8;
  float *to = slot < used ? sums + static_cast<int64_t>(keys[slot]) * 576 + lane % 4 / 2 * 4 : nullptr;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float *own = part + j * 4;
    const float x = __shfl_xor_sync(0xffffffffu, odd ? own[0] : own[2], 1);
    const float y = __shfl_xor_sync(0xffffffffu, odd ? own[1] : own[3], 1);
    if (to)
      atomicAdd(reinterpret_cast<float4 *>(to + j * 8),
                odd ? make_float4(x, y, own[2], own[3]) : make_float4(own[0], own[1], x, y));
  }
}

__device__ __forceinline__ void add_tile(const float *part, int64_t *sums, const int *keys, int used, float factor) {
  const int lane = threadIdx.x % 32, source = lane / 4 * 4 + lane % 4 / 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int slot = threadIdx.x % 128 / 32 * 16 + lane / 4 + half * 8;
    int64_t *to = slot < used ? sums + static_cast<int64_t>(keys[slot]) * 576 + lane % 4 : nullptr;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const float *own = part + j / 2 * 4 + half * 2;
      const float x = __shfl_sync(0xffffffffu, own[0], source + j % 2 * 2);
      const float y = __shfl_sync(0xffffffffu, own[1], source + j % 2 * 2);
      const long long value = __float2ll_rn((lane % 2 ? y : x) * factor);
      if (to) atomicAdd(reinterpret_cast<unsigned long long *>(to + j * 4), static_cast<unsigned long long>(value));
    }
  }
}
"""


@T.macro
def products(p_shared, ds_shared, g, q, chunk, part):
    """Issue part = P^T dO + dS^T Q [64 keys, 64 columns] of one 64-column chunk: two groups."""
    T.wgmma_gemm(p_shared, g[:, chunk * 64 : chunk * 64 + 64], part, transpose_A=True, clear_accum=True)
    T.wgmma_gemm(ds_shared, q[:, chunk * 64 : chunk * 64 + 64], part, transpose_A=True)


@T.macro
def scatter(part, grad_kv, column, idx, row, first, count, factor):
    """Add `part` to columns column … column + 63 of the keys in slots first … first + 63 of the row."""
    T.call_extern(
        "handle",
        "add_tile",
        part.data,
        T.address_of(grad_kv[0, column]),
        T.address_of(idx[row, first]),
        count - first,
        factor[0],
    )


@cache
def backward_kernel(heads: int, fixed_point: bool):
    """Compile for `heads` local heads; rows, pack length, slots and scale stay dynamic.

    One thread block serves one query row and 64 heads, with q and dO resident. For each block of 64 keys the first
    math warpgroup computes S and P, the second dP and dS, and both hand them over through shared memory (bf16).
    Then each owns one half of the columns: first dQ += dS K, after which the key buffer is refilled by threads
    256-383, then, while that gather runs, dK = dS^T Q + P^T dO, 64 columns at a time, added to global memory.
    """
    rows, total, slots = T.dynamic("rows"), T.dynamic("total"), T.dynamic("slots")
    head_blocks = -(-heads // BLOCK)
    sum_type = "int64" if fixed_point else "float32"

    @T.prim_func
    def main(
        grad: T.Tensor([rows, heads, LATENT], "bfloat16"),
        q: T.Tensor([rows, heads, WIDTH], "bfloat16"),
        kv: T.Tensor([total, WIDTH], "bfloat16"),
        out: T.Tensor([rows, heads, LATENT], "bfloat16"),
        lse: T.Tensor([rows, heads], "float32"),
        idx: T.Tensor([rows, slots], "int32"),
        length: T.Tensor([rows], "int32"),
        grad_q: T.Tensor([rows, heads, WIDTH], "bfloat16"),
        grad_kv: T.Tensor([total, WIDTH], sum_type),
        factor: T.Tensor([1], "float32"),
        scale: T.float32,
    ):
        with T.Kernel(rows * head_blocks, threads=384, prelude=HELPERS) as block:
            q_left = T.alloc_shared([BLOCK, HALF], "bfloat16")
            q_right = T.alloc_shared([BLOCK, HALF], "bfloat16")
            q_rope = T.alloc_shared([BLOCK, ROPE], "bfloat16")
            g_left = T.alloc_shared([BLOCK, HALF], "bfloat16")
            g_right = T.alloc_shared([BLOCK, HALF], "bfloat16")
            k_left = T.alloc_shared([BLOCK, HALF], "bfloat16")
            k_right = T.alloc_shared([BLOCK, HALF], "bfloat16")
            k_rope = T.alloc_shared([BLOCK, ROPE], "bfloat16")
            p_shared = T.alloc_shared([BLOCK, BLOCK], "bfloat16")
            ds_shared = T.alloc_shared([BLOCK, BLOCK], "bfloat16")
            full_left = T.alloc_barrier(128)
            full_right = T.alloc_barrier(128)
            free_left = T.alloc_barrier(128)
            free_right = T.alloc_barrier(128)
            p_ready = T.alloc_barrier(128)
            ds_ready = T.alloc_barrier(128)
            tiles_free = T.alloc_barrier(256)

            row = T.cast(block // head_blocks, "int64")
            head = block % head_blocks * BLOCK
            thread = T.get_thread_binding()
            count = length[row]
            blocks = T.ceildiv(count, BLOCK)

            with T.ws(0):
                T.set_max_nreg(240, 1)
                dq = T.alloc_fragment([BLOCK, HALF], "float32")
                dq_rope = T.alloc_fragment([BLOCK, ROPE], "float32")
                s = T.alloc_fragment([BLOCK, BLOCK], "float32")
                p = T.alloc_fragment([BLOCK, BLOCK], "bfloat16")
                part = T.alloc_fragment([BLOCK, BLOCK], "float32")
                lse2 = T.alloc_fragment([BLOCK], "float32")
                for h, c in T.Parallel(BLOCK, HALF):
                    q_left[h, c] = T.if_then_else(head + h < heads, q[row, head + h, c], 0)
                for h, c in T.Parallel(BLOCK, HALF):
                    g_left[h, c] = T.if_then_else(head + h < heads, grad[row, head + h, c], 0)
                for h, c in T.Parallel(BLOCK, ROPE):
                    q_rope[h, c] = T.if_then_else(head + h < heads, q[row, head + h, LATENT + c], 0)
                for h in T.Parallel(BLOCK):
                    lse2[h] = T.if_then_else(head + h < heads, lse[row, head + h] * LOG2E, 0)
                T.fence_proxy_async()
                T.sync_threads(1, 256)
                T.fill(dq, 0)
                T.fill(dq_rope, 0)
                for i in T.serial(blocks):
                    T.barrier_wait(full_left, i & 1)
                    T.fence_proxy_async()
                    T.wgmma_gemm(q_left, k_left, s, transpose_B=True, clear_accum=True)
                    T.barrier_wait(full_right, i & 1)
                    T.fence_proxy_async()
                    T.wgmma_gemm(q_right, k_right, s, transpose_B=True)
                    T.wgmma_gemm(q_rope, k_rope, s, transpose_B=True)
                    T.wait_wgmma(0)
                    for h, u in T.Parallel(BLOCK, BLOCK):
                        s[h, u] = T.if_then_else(
                            i * BLOCK + u < count, T.exp2(s[h, u] * (scale * LOG2E) - lse2[h]), 0.0
                        )
                    T.copy(s, p)
                    T.barrier_wait(tiles_free, (i & 1) ^ 1)
                    T.copy(p, p_shared)
                    T.fence_proxy_async()
                    T.barrier_arrive(p_ready)
                    T.barrier_wait(ds_ready, i & 1)
                    T.wgmma_gemm(ds_shared, k_left, dq)
                    T.wgmma_gemm(ds_shared, k_rope, dq_rope)
                    T.wait_wgmma(0)
                    T.barrier_arrive(free_left)
                    for c in T.unroll(HALF // 64):
                        products(p_shared, ds_shared, g_left, q_left, c, part)
                        T.wait_wgmma(0)
                        if c == HALF // 64 - 1:
                            T.barrier_arrive(tiles_free)
                        scatter(part, grad_kv, c * 64, idx, row, i * BLOCK, count, factor)
                for h, c in T.Parallel(BLOCK, HALF):
                    if head + h < heads:
                        grad_q[row, head + h, c] = dq[h, c]
                for h, c in T.Parallel(BLOCK, ROPE):
                    if head + h < heads:
                        grad_q[row, head + h, LATENT + c] = dq_rope[h, c]

            with T.ws(1):
                T.set_max_nreg(240, 1)
                dq1 = T.alloc_fragment([BLOCK, HALF], "float32")
                ds = T.alloc_fragment([BLOCK, BLOCK], "float32")
                ds_low = T.alloc_fragment([BLOCK, BLOCK], "bfloat16")
                p1 = T.alloc_fragment([BLOCK, BLOCK], "bfloat16")
                part1_a = T.alloc_fragment([BLOCK, BLOCK], "float32")
                part1_b = T.alloc_fragment([BLOCK, BLOCK], "float32")
                delta = T.alloc_fragment([BLOCK], "float32")
                for h, c in T.Parallel(BLOCK, HALF):
                    q_right[h, c] = T.if_then_else(head + h < heads, q[row, head + h, HALF + c], 0)
                for h, c in T.Parallel(BLOCK, HALF):
                    g_right[h, c] = T.if_then_else(head + h < heads, grad[row, head + h, HALF + c], 0)
                # delta = sum_c dO O, the mean of dP under P (the derivative of the softmax needs it).
                T.fill(delta, 0)
                for c in T.serial(LATENT // BLOCK):
                    for h, u in T.Parallel(BLOCK, BLOCK):
                        ds[h, u] = T.if_then_else(
                            head + h < heads,
                            T.cast(grad[row, head + h, c * BLOCK + u], "float32")
                            * T.cast(out[row, head + h, c * BLOCK + u], "float32"),
                            0.0,
                        )
                    T.reduce_sum(ds, delta, dim=1, clear=False)
                T.fence_proxy_async()
                T.sync_threads(1, 256)
                T.fill(dq1, 0)
                for i in T.serial(blocks):
                    T.barrier_wait(full_left, i & 1)
                    T.fence_proxy_async()
                    T.wgmma_gemm(g_left, k_left, ds, transpose_B=True, clear_accum=True)
                    T.barrier_wait(full_right, i & 1)
                    T.fence_proxy_async()
                    T.wgmma_gemm(g_right, k_right, ds, transpose_B=True)
                    T.wait_wgmma(0)
                    T.barrier_wait(p_ready, i & 1)
                    T.copy(p_shared, p1)
                    for h, u in T.Parallel(BLOCK, BLOCK):
                        ds[h, u] = T.cast(p1[h, u], "float32") * (ds[h, u] - delta[h]) * scale
                    T.copy(ds, ds_low)
                    T.copy(ds_low, ds_shared)
                    T.fence_proxy_async()
                    # All rows of dS are the operand of each warp of the transposed products: wait for them too.
                    T.barrier_arrive(ds_ready)
                    T.barrier_wait(ds_ready, i & 1)
                    T.wgmma_gemm(ds_shared, k_right, dq1)
                    products(p_shared, ds_shared, g_right, q_right, 0, part1_a)
                    T.wait_wgmma(2)
                    T.barrier_arrive(free_right)
                    products(p_shared, ds_shared, g_right, q_right, 1, part1_b)
                    T.wait_wgmma(2)
                    scatter(part1_a, grad_kv, HALF, idx, row, i * BLOCK, count, factor)
                    products(p_shared, ds_shared, g_right, q_right, 2, part1_a)
                    T.wait_wgmma(2)
                    scatter(part1_b, grad_kv, HALF + 64, idx, row, i * BLOCK, count, factor)
                    products(p_shared, ds_shared, g_right, q_right, 3, part1_b)
                    T.wait_wgmma(2)
                    scatter(part1_a, grad_kv, HALF + 128, idx, row, i * BLOCK, count, factor)
                    T.wgmma_gemm(ds_shared, q_rope, part1_a, transpose_A=True, clear_accum=True)
                    T.wait_wgmma(1)
                    scatter(part1_b, grad_kv, HALF + 192, idx, row, i * BLOCK, count, factor)
                    T.wait_wgmma(0)
                    T.barrier_arrive(tiles_free)
                    scatter(part1_a, grad_kv, LATENT, idx, row, i * BLOCK, count, factor)
                for h, c in T.Parallel(BLOCK, HALF):
                    if head + h < heads:
                        grad_q[row, head + h, HALF + c] = dq1[h, c]

            with T.ws(2):
                T.set_max_nreg(24, 0)
                lane = (thread - 256) // 8
                column = (thread - 256) % 8 * 8
                key = T.alloc_local([4], "int32")
                for i in T.serial(blocks):
                    for r in T.unroll(4):
                        slot = i * BLOCK + r * 16 + lane
                        key[r] = -1
                        if slot < count:
                            key[r] = idx[row, slot]
                    T.barrier_wait(free_left, (i & 1) ^ 1)
                    gather(kv, key, k_left, 0, HALF, lane, column)
                    gather(kv, key, k_rope, LATENT, ROPE, lane, column)
                    T.cp_async_barrier_noinc(full_left)
                    T.barrier_wait(free_right, (i & 1) ^ 1)
                    gather(kv, key, k_right, HALF, HALF, lane, column)
                    T.cp_async_barrier_noinc(full_right)

    return main
