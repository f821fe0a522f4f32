"""TileLang backward of sparse MLA on Hopper: scores once, dQ in registers, dKV added to memory as it is made."""

from functools import cache
from types import SimpleNamespace

import tilelang.language as T

from megatron_glm.ops.tilelang.sparse_forward import BLOCK, HALF, LATENT, LOG2E, ROPE, WIDTH, gather

# Adds `part`, the wgmma accumulator [64 keys, 64 columns] of one warpgroup, to the rows of its keys. Thread t holds
# columns 8 j + 2 q and 8 j + 2 q + 1, q = t % 4, of key rows 16 (t / 32) + (t % 32) / 4 and 8 further. The additions
# cost more than the products, and they cost by the piece of memory touched, so threads exchange values until an
# instruction of a warp adds long pieces of few rows: fp32, 128 bytes of four rows, 16 bytes a thread.
# The 64-bit fixed-point sums do not depend on the order of the additions, because integer addition is associative;
# there an instruction adds 64 bytes of four rows.
HELPERS = """
#define XOR(value, lanes) __shfl_xor_sync(0xffffffffu, value, lanes)

// Columns 16 m + 4 q to 16 m + 4 q + 3 of the thread's own row.
__device__ __forceinline__ float4 four_columns(const float *part, int m, int half) {
  const int odd = threadIdx.x & 1, high = threadIdx.x & 2;
  const float *a = part + m * 8 + half * 2, *b = a + 4;
  const float x = XOR(high ? a[0] : b[0], 2), y = XOR(high ? a[1] : b[1], 2);
  const float2 low = high ? make_float2(x, y) : make_float2(a[0], a[1]);
  const float2 up = high ? make_float2(b[0], b[1]) : make_float2(x, y);
  const float z = XOR(odd ? low.x : up.x, 1), w = XOR(odd ? low.y : up.y, 1);
  return odd ? make_float4(z, w, up.x, up.y) : make_float4(low.x, low.y, z, w);
}

__device__ __forceinline__ void add_tile(const float *part, float *sums, const int *keys, int used, float) {
  const int lane = threadIdx.x % 32, second = lane & 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int slot = threadIdx.x % 128 / 32 * 16 + half * 8 + lane / 8 * 2;
    float *even = slot < used ? sums + static_cast<int64_t>(keys[slot]) * 576 + lane % 8 * 4 : nullptr;
    float *odd = slot + 1 < used ? sums + static_cast<int64_t>(keys[slot + 1]) * 576 + lane % 8 * 4 : nullptr;
#pragma unroll
    for (int m = 0; m < 4; m += 2) {
      const float4 u = four_columns(part, m, half), v = four_columns(part, m + 1, half), give = second ? u : v;
      const float4 take = make_float4(XOR(give.x, 4), XOR(give.y, 4), XOR(give.z, 4), XOR(give.w, 4));
      if (even) atomicAdd(reinterpret_cast<float4 *>(even + m * 16), second ? take : u);
      if (odd) atomicAdd(reinterpret_cast<float4 *>(odd + m * 16), second ? v : take);
    }
  }
}

__device__ __forceinline__ void add_fixed(int64_t *to, float value) {
  atomicAdd(reinterpret_cast<unsigned long long *>(to), static_cast<unsigned long long>(__float2ll_rn(value)));
}

__device__ __forceinline__ void add_tile(const float *part, int64_t *sums, const int *keys, int used, float factor) {
  const int lane = threadIdx.x % 32, second = lane & 4, source = lane / 4 * 4 + lane % 4 / 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int slot = threadIdx.x % 128 / 32 * 16 + half * 8 + lane / 8 * 2;
    int64_t *even = slot < used ? sums + static_cast<int64_t>(keys[slot]) * 576 + lane % 8 : nullptr;
    int64_t *odd = slot + 1 < used ? sums + static_cast<int64_t>(keys[slot + 1]) * 576 + lane % 8 : nullptr;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float column[2];  // 8 j + q and 8 j + 4 + q of the thread's own row
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float x = __shfl_sync(0xffffffffu, part[j * 4 + half * 2], source + c * 2);
        const float y = __shfl_sync(0xffffffffu, part[j * 4 + half * 2 + 1], source + c * 2);
        column[c] = (lane % 2 ? y : x) * factor;
      }
      const float take = XOR(second ? column[0] : column[1], 4);
      if (even) add_fixed(even + j * 8, second ? take : column[0]);
      if (odd) add_fixed(odd + j * 8, second ? column[1] : take);
    }
  }
}
"""


@T.macro
def products(b, g, q, chunk, part):
    """Issue part = P^T dO + dS^T Q [64 keys, 64 columns] of one 64-column chunk: two groups."""
    T.wgmma_gemm(b.p_shared, g[:, chunk * 64 : chunk * 64 + 64], part, transpose_A=True, clear_accum=True)
    T.wgmma_gemm(b.ds_shared, q[:, chunk * 64 : chunk * 64 + 64], part, transpose_A=True)


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


def shared_buffers() -> SimpleNamespace:
    """Shared memory of a thread block (224 KB: q, dO, one block of keys, P, dS) and its barriers."""
    wide = ("q_left", "q_right", "g_left", "g_right", "k_left", "k_right")
    tiles = {name: T.alloc_shared([BLOCK, HALF], "bfloat16") for name in wide}
    tiles |= {
        name: T.alloc_shared([BLOCK, BLOCK], "bfloat16") for name in ("q_rope", "k_rope", "p_shared", "ds_shared")
    }
    names = ("full_left", "full_right", "free_left", "free_right", "p_ready", "ds_ready")
    barriers = {name: T.alloc_barrier(128) for name in names}
    return SimpleNamespace(**tiles, **barriers, tiles_free=T.alloc_barrier(256))


@T.macro
def row_delta(grad, out, product, delta, row, head, heads):
    """delta = sum_c dO O of each head, the mean of dP under P: the derivative of the softmax needs it.

    `product` is scratch [64, 64] in the layout of a wgmma accumulator.
    """
    T.fill(delta, 0)
    for c in T.serial(LATENT // BLOCK):
        for h, u in T.Parallel(BLOCK, BLOCK):
            product[h, u] = T.if_then_else(
                head + h < heads,
                T.cast(grad[row, head + h, c * BLOCK + u], "float32")
                * T.cast(out[row, head + h, c * BLOCK + u], "float32"),
                0.0,
            )
        T.reduce_sum(product, delta, dim=1, clear=False)


@T.macro
def left_warpgroup(b, grad, q, lse, idx, grad_q, grad_kv, factor, row, head, heads, count, scale):
    """S and P; the left half of the columns and the rope columns of dQ; the left half of dKV."""
    T.set_max_nreg(240, 1)
    dq = T.alloc_fragment([BLOCK, HALF], "float32")
    dq_rope = T.alloc_fragment([BLOCK, ROPE], "float32")
    s = T.alloc_fragment([BLOCK, BLOCK], "float32")
    p = T.alloc_fragment([BLOCK, BLOCK], "bfloat16")
    part = T.alloc_fragment([BLOCK, BLOCK], "float32")
    lse2 = T.alloc_fragment([BLOCK], "float32")
    for h, c in T.Parallel(BLOCK, HALF):
        b.q_left[h, c] = T.if_then_else(head + h < heads, q[row, head + h, c], 0)
    for h, c in T.Parallel(BLOCK, HALF):
        b.g_left[h, c] = T.if_then_else(head + h < heads, grad[row, head + h, c], 0)
    for h, c in T.Parallel(BLOCK, ROPE):
        b.q_rope[h, c] = T.if_then_else(head + h < heads, q[row, head + h, LATENT + c], 0)
    for h in T.Parallel(BLOCK):
        lse2[h] = T.if_then_else(head + h < heads, lse[row, head + h] * LOG2E, 0)
    T.fence_proxy_async()
    T.sync_threads(1, 256)
    T.fill(dq, 0)
    T.fill(dq_rope, 0)
    for i in T.serial(T.ceildiv(count, BLOCK)):
        T.barrier_wait(b.full_left, i & 1)
        T.fence_proxy_async()
        T.wgmma_gemm(b.q_left, b.k_left, s, transpose_B=True, clear_accum=True)
        T.barrier_wait(b.full_right, i & 1)
        T.fence_proxy_async()
        T.wgmma_gemm(b.q_right, b.k_right, s, transpose_B=True)
        T.wgmma_gemm(b.q_rope, b.k_rope, s, transpose_B=True)
        T.wait_wgmma(0)
        for h, u in T.Parallel(BLOCK, BLOCK):
            s[h, u] = T.if_then_else(i * BLOCK + u < count, T.exp2(s[h, u] * (scale * LOG2E) - lse2[h]), 0.0)
        T.copy(s, p)
        T.barrier_wait(b.tiles_free, (i & 1) ^ 1)
        T.copy(p, b.p_shared)
        T.fence_proxy_async()
        T.barrier_arrive(b.p_ready)
        T.barrier_wait(b.ds_ready, i & 1)
        T.wgmma_gemm(b.ds_shared, b.k_left, dq)
        T.wgmma_gemm(b.ds_shared, b.k_rope, dq_rope)
        T.wait_wgmma(0)
        T.barrier_arrive(b.free_left)
        for c in T.unroll(HALF // 64):
            products(b, b.g_left, b.q_left, c, part)
            T.wait_wgmma(0)
            if c == HALF // 64 - 1:
                T.barrier_arrive(b.tiles_free)
            scatter(part, grad_kv, c * 64, idx, row, i * BLOCK, count, factor)
    for h, c in T.Parallel(BLOCK, HALF):
        if head + h < heads:
            grad_q[row, head + h, c] = dq[h, c]
    for h, c in T.Parallel(BLOCK, ROPE):
        if head + h < heads:
            grad_q[row, head + h, LATENT + c] = dq_rope[h, c]


@T.macro
def right_warpgroup(b, grad, q, out, idx, grad_q, grad_kv, factor, row, head, heads, count, scale):
    """dP and dS; the right half of the columns of dQ; the right half and the rope columns of dKV."""
    T.set_max_nreg(240, 1)
    dq = T.alloc_fragment([BLOCK, HALF], "float32")
    ds = T.alloc_fragment([BLOCK, BLOCK], "float32")
    ds_low = T.alloc_fragment([BLOCK, BLOCK], "bfloat16")
    p = T.alloc_fragment([BLOCK, BLOCK], "bfloat16")
    part_a = T.alloc_fragment([BLOCK, BLOCK], "float32")
    part_b = T.alloc_fragment([BLOCK, BLOCK], "float32")
    delta = T.alloc_fragment([BLOCK], "float32")
    for h, c in T.Parallel(BLOCK, HALF):
        b.q_right[h, c] = T.if_then_else(head + h < heads, q[row, head + h, HALF + c], 0)
    for h, c in T.Parallel(BLOCK, HALF):
        b.g_right[h, c] = T.if_then_else(head + h < heads, grad[row, head + h, HALF + c], 0)
    row_delta(grad, out, ds, delta, row, head, heads)
    T.fence_proxy_async()
    T.sync_threads(1, 256)
    T.fill(dq, 0)
    for i in T.serial(T.ceildiv(count, BLOCK)):
        T.barrier_wait(b.full_left, i & 1)
        T.fence_proxy_async()
        T.wgmma_gemm(b.g_left, b.k_left, ds, transpose_B=True, clear_accum=True)
        T.barrier_wait(b.full_right, i & 1)
        T.fence_proxy_async()
        T.wgmma_gemm(b.g_right, b.k_right, ds, transpose_B=True)
        T.wait_wgmma(0)
        T.barrier_wait(b.p_ready, i & 1)
        T.copy(b.p_shared, p)
        for h, u in T.Parallel(BLOCK, BLOCK):
            ds[h, u] = T.cast(p[h, u], "float32") * (ds[h, u] - delta[h]) * scale
        T.copy(ds, ds_low)
        T.copy(ds_low, b.ds_shared)
        T.fence_proxy_async()
        # All rows of dS are the operand of each warp of the transposed products: wait for them too.
        T.barrier_arrive(b.ds_ready)
        T.barrier_wait(b.ds_ready, i & 1)
        T.wgmma_gemm(b.ds_shared, b.k_right, dq)
        products(b, b.g_right, b.q_right, 0, part_a)
        T.wait_wgmma(2)
        T.barrier_arrive(b.free_right)
        products(b, b.g_right, b.q_right, 1, part_b)
        T.wait_wgmma(2)
        scatter(part_a, grad_kv, HALF, idx, row, i * BLOCK, count, factor)
        products(b, b.g_right, b.q_right, 2, part_a)
        T.wait_wgmma(2)
        scatter(part_b, grad_kv, HALF + 64, idx, row, i * BLOCK, count, factor)
        products(b, b.g_right, b.q_right, 3, part_b)
        T.wait_wgmma(2)
        scatter(part_a, grad_kv, HALF + 128, idx, row, i * BLOCK, count, factor)
        T.wgmma_gemm(b.ds_shared, b.q_rope, part_a, transpose_A=True, clear_accum=True)
        T.wait_wgmma(1)
        scatter(part_b, grad_kv, HALF + 192, idx, row, i * BLOCK, count, factor)
        T.wait_wgmma(0)
        T.barrier_arrive(b.tiles_free)
        scatter(part_a, grad_kv, LATENT, idx, row, i * BLOCK, count, factor)
    for h, c in T.Parallel(BLOCK, HALF):
        if head + h < heads:
            grad_q[row, head + h, HALF + c] = dq[h, c]


@T.macro
def gather_warpgroup(b, kv, idx, row, count, thread):
    """Copies of the key blocks, as the halves of the buffer become free."""
    T.set_max_nreg(24, 0)
    lane = (thread - 256) // 8
    column = (thread - 256) % 8 * 8
    key = T.alloc_local([4], "int32")
    for i in T.serial(T.ceildiv(count, BLOCK)):
        for r in T.unroll(4):
            slot = i * BLOCK + r * 16 + lane
            key[r] = -1
            if slot < count:
                key[r] = idx[row, slot]
        T.barrier_wait(b.free_left, (i & 1) ^ 1)
        gather(kv, key, b.k_left, 0, HALF, lane, column)
        gather(kv, key, b.k_rope, LATENT, ROPE, lane, column)
        T.cp_async_barrier_noinc(b.full_left)
        T.barrier_wait(b.free_right, (i & 1) ^ 1)
        gather(kv, key, b.k_right, HALF, HALF, lane, column)
        T.cp_async_barrier_noinc(b.full_right)


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
            b = shared_buffers()
            row = T.cast(block // head_blocks, "int64")
            head = block % head_blocks * BLOCK
            thread = T.get_thread_binding()
            count = length[row]
            with T.ws(0):
                left_warpgroup(b, grad, q, lse, idx, grad_q, grad_kv, factor, row, head, heads, count, scale)
            with T.ws(1):
                right_warpgroup(b, grad, q, out, idx, grad_q, grad_kv, factor, row, head, heads, count, scale)
            with T.ws(2):
                gather_warpgroup(b, kv, idx, row, count, thread)

    return main
