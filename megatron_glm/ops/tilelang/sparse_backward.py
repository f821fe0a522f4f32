"""TileLang backward of sparse MLA on Hopper: one warpgroup makes P and dS, the other dKV, while the first goes on."""

# pyright: reportInvalidTypeForm=false
# TileLang reads shapes of buffers from annotations.

from functools import cache
from types import SimpleNamespace

import tilelang.language as T

from megatron_glm.ops.tilelang.sparse_forward import BLOCK, HALF, LATENT, LOG2E, ROPE, WIDTH, gather

# What becomes of `part`, the wgmma accumulator [64 keys, 64 columns] of one warpgroup. Thread t has columns 8 j + 2 q
# and 8 j + 2 q + 1, q = t % 4, j < 8, of key rows 16 (t / 32) + (t % 32) / 4 and 8 further. Memory costs more than the
# products, and it costs by the pieces touched, so that a row of sums keeps its columns in an order of its own, in which
# the numbers of a thread lie together: see SUM_ORDER.
#
# add_tile: an instruction of a warp adds 128 bytes to each of four rows; threads 4 lanes apart exchange halves for it.
# put_tile: an instruction writes 64 bytes of each of eight rows, once and for long: past the keys in the L2.
HELPERS = """
#define XOR(value, lanes) __shfl_xor_sync(0xffffffffu, value, lanes)

// The keys of this thread's two pairs of rows; -1 in unused slots.
__device__ __forceinline__ void row_keys(int *keys, const int *slots, int used) {
  const int slot = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 8 * 2;
#pragma unroll
  for (int n = 0; n < 4; ++n) keys[n] = slot + n / 2 * 8 + n % 2 < used ? slots[slot + n / 2 * 8 + n % 2] : -1;
}

__device__ __forceinline__ void add_tile(const float *part, float *sums, const int *keys) {
  const int lane = threadIdx.x % 32, second = lane & 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int even_key = keys[half * 2], odd_key = keys[half * 2 + 1];
    float *even = sums + static_cast<int64_t>(even_key) * 576 + lane % 4 * 4 + second * 4;
    float *odd = sums + static_cast<int64_t>(odd_key) * 576 + lane % 4 * 4 + (second ^ 4) * 4;
#pragma unroll
    for (int line = 0; line < 2; ++line) {
      const float *a = part + line * 16 + half * 2;
      const float4 low = make_float4(a[0], a[1], a[4], a[5]);
      const float4 high = make_float4(XOR(a[8], 4), XOR(a[9], 4), XOR(a[12], 4), XOR(a[13], 4));
      if (even_key >= 0) atomicAdd(reinterpret_cast<float4 *>(even + line * 32), second ? high : low);
      if (odd_key >= 0) atomicAdd(reinterpret_cast<float4 *>(odd + line * 32), second ? low : high);
    }
  }
}

__device__ __forceinline__ unsigned two_bf16(float low, float high) {
  unsigned both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

__device__ __forceinline__ void put_tile(const float *part, void *rows, int used) {
  const int lane = threadIdx.x % 32, slot = threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint4 *row = reinterpret_cast<uint4 *>(rows) + (slot + half * 8) * (576 / 8) + lane % 4;
#pragma unroll
    for (int line = 0; line < 2; ++line) {
      const float *a = part + line * 16 + half * 2;
      const unsigned x = two_bf16(a[0], a[1]), y = two_bf16(a[4], a[5]);
      const unsigned z = two_bf16(a[8], a[9]), w = two_bf16(a[12], a[13]);
      if (slot + half * 8 < used) __stcs(row + line * 4, make_uint4(x, y, z, w));
    }
  }
}
"""

# Column 8 (n m + j) + 2 q + c of dKV, j < n, q < 4, c < 2, is at 8 n m + 2 n q + 2 j + c; n of sums and of parts.
SUM_ORDER, PART_ORDER = 2, 4
PART_TYPE = "bfloat16"


def shared_buffers() -> SimpleNamespace:
    """Shared memory of a thread block (224 KB: q, dO, one block of keys, P, dS) and its barriers."""
    wide = ("q_left", "q_right", "g_left", "g_right", "k_left", "k_right")
    tiles = {name: T.alloc_shared([BLOCK, HALF], "bfloat16") for name in wide}
    tiles |= {
        name: T.alloc_shared([BLOCK, BLOCK], "bfloat16") for name in ("q_rope", "k_rope", "p_shared", "ds_shared")
    }
    names = ("full_left", "full_right", "free_right", "p_ready", "ds_ready", "tiles_free")
    barriers = {name: T.alloc_barrier(128) for name in names}
    return SimpleNamespace(**tiles, **barriers)


@T.macro
def products(b, g, q, chunk, part):
    """Issue part = P^T dO + dS^T Q [64 keys, 64 columns] of one 64-column chunk: two groups."""
    T.wgmma_gemm(b.p_shared, g[:, chunk * 64 : chunk * 64 + 64], part, transpose_A=True, clear_accum=True)
    T.wgmma_gemm(b.ds_shared, q[:, chunk * 64 : chunk * 64 + 64], part, transpose_A=True)


@T.macro
def deliver(part, target, column, keys, block, first, count):
    """Add columns column … column + 63 of 64 keys to the sums [total, WIDTH], or write them into the rows of their
    slots [blocks, slots, WIDTH]."""
    if len(target.shape) == 2:
        T.call_extern("handle", "add_tile", part.data, T.address_of(target[0, column]), keys.data)
    else:
        T.call_extern("handle", "put_tile", part.data, T.address_of(target[block, first, column]), count - first)


@T.macro
def load_slots(key, idx, row, first, count, lane):
    """The keys that this thread helps to gather; -1 in unused slots."""
    for r in T.unroll(4):
        key[r] = -1
        if first + r * 16 + lane < count:
            key[r] = idx[row, first + r * 16 + lane]


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
def first_warpgroup(b, grad, q, kv, out, lse, idx, grad_q, row, head, heads, count, thread, scale):
    """Gathers keys; P and dS; the left half of the columns of dQ."""
    dq = T.alloc_fragment([BLOCK, HALF], "float32")
    s = T.alloc_fragment([BLOCK, BLOCK], "float32")
    ds = T.alloc_fragment([BLOCK, BLOCK], "float32")
    p = T.alloc_fragment([BLOCK, BLOCK], "bfloat16")
    ds_low = T.alloc_fragment([BLOCK, BLOCK], "bfloat16")
    lse2 = T.alloc_fragment([BLOCK], "float32")
    delta = T.alloc_fragment([BLOCK], "float32")
    key = T.alloc_local([4], "int32")
    lane = thread // 8  # eight threads a key, 16 bytes each: one swizzle row of 128 bytes
    column = thread % 8 * 8
    if count > 0:
        load_slots(key, idx, row, 0, count, lane)
        gather(kv, key, b.k_left, 0, HALF, lane, column)
        T.cp_async_barrier_noinc(b.full_left)
        gather(kv, key, b.k_right, HALF, HALF, lane, column)
        gather(kv, key, b.k_rope, LATENT, ROPE, lane, column)
        T.cp_async_barrier_noinc(b.full_right)
    for h, c in T.Parallel(BLOCK, HALF):
        b.q_left[h, c] = T.if_then_else(head + h < heads, q[row, head + h, c], 0)
    for h, c in T.Parallel(BLOCK, HALF):
        b.g_left[h, c] = T.if_then_else(head + h < heads, grad[row, head + h, c], 0)
    for h in T.Parallel(BLOCK):
        lse2[h] = T.if_then_else(head + h < heads, lse[row, head + h] * LOG2E, 0)
    row_delta(grad, out, ds, delta, row, head, heads)
    T.fence_proxy_async()
    T.sync_threads(1, 256)
    T.fill(dq, 0)
    for i in T.serial(T.ceildiv(count, BLOCK)):
        T.barrier_wait(b.full_left, i & 1)
        T.fence_proxy_async()
        T.wgmma_gemm(b.q_left, b.k_left, s, transpose_B=True, clear_accum=True)
        T.barrier_wait(b.full_right, i & 1)
        T.fence_proxy_async()
        T.wgmma_gemm(b.q_right, b.k_right, s, transpose_B=True)
        T.wgmma_gemm(b.q_rope, b.k_rope, s, transpose_B=True)
        T.wgmma_gemm(b.g_left, b.k_left, ds, transpose_B=True, clear_accum=True)
        T.wgmma_gemm(b.g_right, b.k_right, ds, transpose_B=True)
        T.wait_wgmma(2)
        for h, u in T.Parallel(BLOCK, BLOCK):
            s[h, u] = T.if_then_else(i * BLOCK + u < count, T.exp2(s[h, u] * (scale * LOG2E) - lse2[h]), 0.0)
        T.copy(s, p)
        T.barrier_wait(b.tiles_free, (i & 1) ^ 1)
        T.copy(p, b.p_shared)
        T.fence_proxy_async()
        T.barrier_arrive(b.p_ready)
        T.wait_wgmma(0)
        for h, u in T.Parallel(BLOCK, BLOCK):
            ds[h, u] = T.cast(p[h, u], "float32") * (ds[h, u] - delta[h]) * scale
        T.copy(ds, ds_low)
        T.copy(ds_low, b.ds_shared)
        T.fence_proxy_async()
        T.barrier_arrive(b.ds_ready)
        T.wgmma_gemm(ds_low, b.k_left, dq)
        load_slots(key, idx, row, (i + 1) * BLOCK, count, lane)
        T.wait_wgmma(0)
        # Every warp of this warpgroup has read the buffer.
        T.sync_threads(2, 128)
        if (i + 1) * BLOCK < count:
            gather(kv, key, b.k_left, 0, HALF, lane, column)
            T.cp_async_barrier_noinc(b.full_left)
            T.barrier_wait(b.free_right, i & 1)
            gather(kv, key, b.k_right, HALF, HALF, lane, column)
            gather(kv, key, b.k_rope, LATENT, ROPE, lane, column)
            T.cp_async_barrier_noinc(b.full_right)
    for h, c in T.Parallel(BLOCK, HALF):
        if head + h < heads:
            grad_q[row, head + h, c] = dq[h, c]


@T.macro
def key_gradients(b, dq, dq_rope, part_a, part_b, target, keys, block, first, count):
    """One block of keys: dQ += dS K, and dKV, whose columns leave while the next ones are computed."""
    T.wgmma_gemm(b.ds_shared, b.k_right, dq)
    T.wgmma_gemm(b.ds_shared, b.k_rope, dq_rope)
    products(b, b.g_left, b.q_left, 0, part_a)
    T.wait_wgmma(2)
    T.barrier_arrive(b.free_right)
    products(b, b.g_left, b.q_left, 1, part_b)
    T.wait_wgmma(2)
    deliver(part_a, target, 0, keys, block, first, count)
    products(b, b.g_left, b.q_left, 2, part_a)
    T.wait_wgmma(2)
    deliver(part_b, target, 64, keys, block, first, count)
    products(b, b.g_left, b.q_left, 3, part_b)
    T.wait_wgmma(2)
    deliver(part_a, target, 128, keys, block, first, count)
    products(b, b.g_right, b.q_right, 0, part_a)
    T.wait_wgmma(2)
    deliver(part_b, target, 192, keys, block, first, count)
    products(b, b.g_right, b.q_right, 1, part_b)
    T.wait_wgmma(2)
    deliver(part_a, target, 256, keys, block, first, count)
    products(b, b.g_right, b.q_right, 2, part_a)
    T.wait_wgmma(2)
    deliver(part_b, target, 320, keys, block, first, count)
    products(b, b.g_right, b.q_right, 3, part_b)
    T.wait_wgmma(2)
    deliver(part_a, target, 384, keys, block, first, count)
    T.wgmma_gemm(b.ds_shared, b.q_rope, part_a, transpose_A=True, clear_accum=True)
    T.wait_wgmma(0)
    T.barrier_arrive(b.tiles_free)
    deliver(part_b, target, 448, keys, block, first, count)
    deliver(part_a, target, LATENT, keys, block, first, count)


@T.macro
def second_warpgroup(b, grad, q, idx, grad_q, target, block, row, head, heads, count):
    """The right half of the columns and the rope columns of dQ; dKV."""
    dq = T.alloc_fragment([BLOCK, HALF], "float32")
    dq_rope = T.alloc_fragment([BLOCK, ROPE], "float32")
    part_a = T.alloc_fragment([BLOCK, BLOCK], "float32")
    part_b = T.alloc_fragment([BLOCK, BLOCK], "float32")
    keys = T.alloc_local([4], "int32")
    for h, c in T.Parallel(BLOCK, HALF):
        b.q_right[h, c] = T.if_then_else(head + h < heads, q[row, head + h, HALF + c], 0)
    for h, c in T.Parallel(BLOCK, HALF):
        b.g_right[h, c] = T.if_then_else(head + h < heads, grad[row, head + h, HALF + c], 0)
    for h, c in T.Parallel(BLOCK, ROPE):
        b.q_rope[h, c] = T.if_then_else(head + h < heads, q[row, head + h, LATENT + c], 0)
    T.fence_proxy_async()
    T.sync_threads(1, 256)
    T.fill(dq, 0)
    T.fill(dq_rope, 0)
    for i in T.serial(T.ceildiv(count, BLOCK)):
        if len(target.shape) == 2:
            T.call_extern("handle", "row_keys", keys.data, T.address_of(idx[row, i * BLOCK]), count - i * BLOCK)
        T.barrier_wait(b.p_ready, i & 1)
        T.barrier_wait(b.ds_ready, i & 1)
        key_gradients(b, dq, dq_rope, part_a, part_b, target, keys, block, i * BLOCK, count)
    for h, c in T.Parallel(BLOCK, HALF):
        if head + h < heads:
            grad_q[row, head + h, HALF + c] = dq[h, c]
    for h, c in T.Parallel(BLOCK, ROPE):
        if head + h < heads:
            grad_q[row, head + h, LATENT + c] = dq_rope[h, c]


@cache
def backward_kernel(heads: int, apart: bool):
    """Compile for `heads` local heads; rows, pack length, slots and scale stay dynamic.

    One thread block serves one query row and 64 heads, with q and dO resident, in blocks of 64 keys. The first
    warpgroup computes S, P, dP and dS, hands P and dS over through shared memory (bf16), adds dS K to its half of dQ
    and gathers the next block. The second adds dS K to the rest of dQ and computes dKV = P^T dO + dS^T Q, 64 columns at
    a time, so that the memory's work runs during the first one's products.

    grad_kv is [total, WIDTH] fp32, added to by atomics, or, if `apart`, the parts of dKV of each row, block of heads
    and slot, [rows x blocks of heads, slots, WIDTH] bf16, where nothing is written for unused slots. The columns of
    either are in the order of SUM_ORDER and PART_ORDER.
    """
    rows, total, slots, blocks = T.dynamic("rows"), T.dynamic("total"), T.dynamic("slots"), T.dynamic("blocks")
    head_blocks = -(-heads // BLOCK)
    shape, kind = ([blocks, slots, WIDTH], PART_TYPE) if apart else ([total, WIDTH], "float32")

    @T.prim_func
    def sparse_mla_backward(
        grad: T.Tensor([rows, heads, LATENT], "bfloat16"),
        q: T.Tensor([rows, heads, WIDTH], "bfloat16"),
        kv: T.Tensor([total, WIDTH], "bfloat16"),
        out: T.Tensor([rows, heads, LATENT], "bfloat16"),
        lse: T.Tensor([rows, heads], "float32"),
        idx: T.Tensor([rows, slots], "int32"),
        length: T.Tensor([rows], "int32"),
        grad_q: T.Tensor([rows, heads, WIDTH], "bfloat16"),
        grad_kv: T.Tensor(shape, kind),
        scale: T.float32,
    ):
        with T.Kernel(rows * head_blocks, threads=256, prelude=HELPERS) as block:
            b = shared_buffers()
            row = T.cast(block // head_blocks, "int64")
            head = block % head_blocks * BLOCK
            thread = T.get_thread_binding()
            count = length[row]
            with T.ws(0):
                first_warpgroup(b, grad, q, kv, out, lse, idx, grad_q, row, head, heads, count, thread, scale)
            with T.ws(1):
                second_warpgroup(b, grad, q, idx, grad_q, grad_kv, T.cast(block, "int64"), row, head, heads, count)

    return sparse_mla_backward
