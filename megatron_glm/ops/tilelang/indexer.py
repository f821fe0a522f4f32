"""TileLang kernels of the indexer: scores of a chunk of rows, then the exact top-k of each row by radix select."""

# pyright: reportInvalidTypeForm=false
# TileLang reads shapes of buffers from annotations.

from functools import cache

import tilelang.language as T

HEADS, DIM = 32, 128  # of the lightning indexer: the only ones served
QUERIES, KEYS = 8, 64  # rows of one thread block; keys of one tile, the M of wgmma
STAGES = 3  # key tiles in flight per warpgroup
BINS = 2048  # of a histogram: 11 bits of the key a pass
SELECT_THREADS, SELECT_WARPS, LOADS = 512, 16, 4  # LOADS: scores a thread fetches at a time

# Turns the wgmma accumulator [64 keys, 8 queries x 32 heads] of one warpgroup into scores. A thread has, for two key
# rows 8 apart, 8 of the 32 heads of every query; its three neighbours have the others. Two exchanges sum over the four
# and leave each with the scores of one key and four queries.
HELPERS = """
__device__ __forceinline__ void reduce_heads(const float *acc, const float *weight, float *score) {
  const int lane = threadIdx.x % 32, odd = lane & 1, high = lane & 2;
  float sums[8];
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    float first = 0.f, second = 0.f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float w = weight[n * 8 + j * 2 + c];
        first = fmaf(fmaxf(acc[(n * 4 + j) * 4 + c], 0.f), w, first);
        second = fmaf(fmaxf(acc[(n * 4 + j) * 4 + 2 + c], 0.f), w, second);
      }
    }
    sums[n] = (odd ? second : first) + __shfl_xor_sync(0xffffffffu, odd ? first : second, 1);
  }
#pragma unroll
  for (int n = 0; n < 4; ++n)
    score[n] = (high ? sums[n + 4] : sums[n]) + __shfl_xor_sync(0xffffffffu, high ? sums[n] : sums[n + 4], 2);
}
"""


@T.macro
def load_weights(w, weight, row, rows, lane):
    """The weights of this thread's columns of the accumulator; rows past the last repeat it."""
    for n, j, c in T.grid(QUERIES, HEADS // 8, 2):
        weight[n * 8 + j * 2 + c] = w[T.min(row + n, rows - 1), j * 8 + lane % 4 * 2 + c]


@T.macro
def score_tiles(group, q_shared, k_shared, full, free, weight, scores, row, rows, first, last, thread):
    """One math warpgroup: every second tile of 64 keys against the 8 queries of the block."""
    acc = T.alloc_fragment([KEYS, QUERIES * HEADS], "float32")
    score = T.alloc_local([4], "float32")
    for i in T.serial(T.ceildiv(last - first - group * KEYS, 2 * KEYS)):
        T.barrier_wait(full[i % STAGES], i // STAGES & 1)
        T.fence_proxy_async()
        T.wgmma_gemm(k_shared[i % STAGES, :, :], q_shared, acc, transpose_B=True, clear_accum=True)
        T.wait_wgmma(0)
        T.barrier_arrive(free[i % STAGES])
        T.call_extern("handle", "reduce_heads", acc.data, weight.data, score.data)
        key = first + (i * 2 + group) * KEYS + thread % 128 // 32 * 16 + thread % 2 * 8 + thread % 32 // 4
        for n in T.unroll(4):
            query = row + thread % 4 // 2 * 4 + n
            if query < rows and key < last:
                scores[T.cast(query, "int64"), key] = score[n]


@cache
def score_kernel():
    """scores[t, u] = sum_h w[t, h] relu(iq[t, h] . ik[u]) in fp32, for u in the range of the row (at least).

    A thread block serves 8 consecutive rows: their queries, 256 rows of 128 numbers, stay in shared memory as the B
    operand; keys are A, so that heads lie along N and most of their sum is inside a thread. Two warpgroups take turns
    on the tensor cores, tile by tile; the third gathers. Later rows, which see more keys, start first.
    """
    rows, total = T.dynamic("rows"), T.dynamic("total")

    @T.prim_func
    def indexer_scores(
        iq: T.Tensor([rows, HEADS, DIM], "bfloat16"),
        ik: T.Tensor([total, DIM], "bfloat16"),
        w: T.Tensor([rows, HEADS], "float32"),
        start: T.Tensor([rows], "int32"),
        end: T.Tensor([rows], "int32"),
        scores: T.Tensor([rows, total], "float32"),
    ):
        with T.Kernel(T.ceildiv(rows, QUERIES), threads=384, prelude=HELPERS) as block:
            q_shared = T.alloc_shared([QUERIES * HEADS, DIM], "bfloat16")
            k0_shared = T.alloc_shared([STAGES, KEYS, DIM], "bfloat16")
            k1_shared = T.alloc_shared([STAGES, KEYS, DIM], "bfloat16")
            full0 = T.alloc_barrier([128] * STAGES)
            full1 = T.alloc_barrier([128] * STAGES)
            free0 = T.alloc_barrier([128] * STAGES)
            free1 = T.alloc_barrier([128] * STAGES)

            row = (T.ceildiv(rows, QUERIES) - 1 - block) * QUERIES
            thread = T.get_thread_binding()
            # Union of the ranges of the rows; an empty range does not count.
            first = T.alloc_var("int32", init=total)
            last = T.alloc_var("int32", init=0)
            for n in T.serial(QUERIES):
                if row + n < rows:
                    if start[row + n] < end[row + n]:
                        first = T.min(first, start[row + n])
                        last = T.max(last, end[row + n])

            with T.ws(0):
                T.set_max_nreg(240, 1)
                weight0 = T.alloc_local([QUERIES * 8], "float32")
                load_weights(w, weight0, row, rows, thread % 32)
                for n, d in T.Parallel(QUERIES * HEADS // 2, DIM):
                    q_shared[n, d] = iq[T.cast(T.min(row + n // HEADS, rows - 1), "int64"), n % HEADS, d]
                T.fence_proxy_async()
                T.sync_threads(1, 256)
                score_tiles(0, q_shared, k0_shared, full0, free0, weight0, scores, row, rows, first, last, thread)
            with T.ws(1):
                T.set_max_nreg(240, 1)
                weight1 = T.alloc_local([QUERIES * 8], "float32")
                load_weights(w, weight1, row, rows, thread % 32)
                for n, d in T.Parallel(QUERIES * HEADS // 2, DIM):
                    q_shared[QUERIES * HEADS // 2 + n, d] = iq[
                        T.cast(T.min(row + QUERIES // 2 + n // HEADS, rows - 1), "int64"), n % HEADS, d
                    ]
                T.fence_proxy_async()
                T.sync_threads(1, 256)
                score_tiles(1, q_shared, k1_shared, full1, free1, weight1, scores, row, rows, first, last, thread)
            with T.ws(2):
                T.set_max_nreg(24, 0)
                for i in T.serial(T.ceildiv(last - first, 2 * KEYS)):
                    T.barrier_wait(free0[i % STAGES], (i // STAGES & 1) ^ 1)
                    copy_keys(ik, k0_shared, i % STAGES, first + i * 2 * KEYS, total, thread - 256)
                    T.cp_async_barrier_noinc(full0[i % STAGES])
                    if first + (i * 2 + 1) * KEYS < last:
                        T.barrier_wait(free1[i % STAGES], (i // STAGES & 1) ^ 1)
                        copy_keys(ik, k1_shared, i % STAGES, first + (i * 2 + 1) * KEYS, total, thread - 256)
                        T.cp_async_barrier_noinc(full1[i % STAGES])

    return indexer_scores


@T.macro
def copy_keys(ik, k_shared, stage, first, total, thread):
    """Issue this thread's share of a tile of 64 keys; keys past the last become zeros."""
    for item in T.unroll(KEYS * DIM // 8 // 128):
        key, column = item * 8 + thread // 16, thread % 16 * 8
        T.ptx_cp_async(
            T.access_ptr(k_shared[stage, key, column], "w", 8),
            T.access_ptr(ik[T.min(first + key, total - 1), column], "r", 8),
            8,
            first + key < total,
        )


@T.macro
def block_prefix(value, sums, lane, warp):
    """Sum of `value` over the threads before this one; `sums` is scratch for one number a warp."""
    inclusive = T.alloc_var("int32", init=value)
    for d in T.unroll(5, explicit=True):
        other = T.shfl_up(inclusive, 1 << d)
        inclusive = inclusive + T.if_then_else(lane >= 1 << d, other, 0)
    if lane == 31:
        sums[warp] = inclusive
    T.sync_threads()
    for v in T.serial(warp):
        inclusive += sums[v]
    return inclusive - value


@T.macro
def warp_base(value, sums, lane, warp):
    """Sum of `value` over the threads of all warps before this one; `sums` is scratch for one number a warp."""
    total = T.alloc_var("int32", init=value)
    for d in T.unroll(5, explicit=True):
        total = total + T.shfl_xor(total, 1 << d)
    if lane == 0:
        sums[warp] = total
    T.sync_threads()
    total = 0
    for v in T.serial(warp):
        total += sums[v]
    return total


@T.macro
def load_keys(scores, row, first, count, u, stride, value):
    """value[v] = position u + v stride's score as an unsigned integer of the same order; 0 outside the range.

    All loads are started before the first is used. Score -0 equals 0.
    """
    score = T.alloc_local([LOADS], "float32")
    for v in T.unroll(LOADS):
        score[v] = 0
        if u + v * stride < count:
            score[v] = scores[row, first + u + v * stride]
    for v in T.unroll(LOADS):
        bits = T.alloc_var("int32", init=T.reinterpret(score[v], "int32"))
        # Positive: set the sign bit. Negative: flip all bits.
        ordered = T.alloc_var("uint32", init=T.reinterpret(bits ^ (bits >> 31 | T.int32(-(2**31))), "uint32"))
        if ordered == T.uint32(2**31 - 1):
            ordered = T.uint32(2**31)
        value[v] = T.if_then_else(u + v * stride < count, ordered, T.uint32(0))


@T.macro
def radix_pass(scores, row, first, count, histogram, warp_sums, found, shift, bits, thread):
    """Extend the prefix found[0] of the threshold by `bits` bits; found[1] of the keys with that prefix are wanted."""
    lane, warp = thread % 32, thread // 32
    for j in T.unroll(BINS // SELECT_THREADS):
        histogram[j * SELECT_THREADS + thread] = 0
    T.sync_threads()
    prefix = T.alloc_var("uint32", init=T.reinterpret(found[0], "uint32"))
    need = T.alloc_var("int32", init=found[1])
    value = T.alloc_local([LOADS], "uint32")
    for j in T.serial(T.ceildiv(count, SELECT_THREADS * LOADS)):
        load_keys(scores, row, first, count, j * SELECT_THREADS * LOADS + thread, SELECT_THREADS, value)
        for v in T.unroll(LOADS):
            inside = (j * LOADS + v) * SELECT_THREADS + thread < count
            # In two shifts: by 32, in the first pass, is undefined.
            if inside and value[v] >> T.uint32(shift) >> T.uint32(bits) == prefix:
                T.atomic_add(histogram[T.cast(value[v] >> T.uint32(shift) & T.uint32((1 << bits) - 1), "int32")], 1)
    T.sync_threads()
    # Thread t looks at its share of the bins, the largest first, after those of the threads before it.
    mine = T.alloc_var("int32", init=0)
    for b in T.unroll(BINS // SELECT_THREADS):
        mine += histogram[BINS - 1 - thread * (BINS // SELECT_THREADS) - b]
    above = T.alloc_var("int32", init=block_prefix(mine, warp_sums, lane, warp))
    for b in T.unroll(BINS // SELECT_THREADS):
        bin = BINS - 1 - thread * (BINS // SELECT_THREADS) - b
        size = T.alloc_var("int32", init=histogram[bin])
        if above < need and need <= above + size:
            found[0] = T.reinterpret(prefix << T.uint32(bits) | T.cast(bin, "uint32"), "int32")
            found[1] = need - above
        above += size
    T.sync_threads()


@cache
def select_kernel():
    """idx[t] = the k best positions of scores[t, start[t]:end[t]], ascending, lowest position first among equals.

    One thread block a row. Three histograms of 11, 11 and 10 bits find the k-th largest score exactly and how many
    of its equals belong to the k. Each warp then owns one contiguous part of the row: it counts what it will keep,
    the counts are summed over the warps before it, and it writes its positions in order.
    """
    rows, total, k = T.dynamic("rows"), T.dynamic("total"), T.dynamic("k")

    @T.prim_func
    def indexer_top_k(
        scores: T.Tensor([rows, total], "float32"),
        start: T.Tensor([rows], "int32"),
        end: T.Tensor([rows], "int32"),
        idx: T.Tensor([rows, k], "int32"),
    ):
        with T.Kernel(rows, threads=SELECT_THREADS) as block:
            histogram = T.alloc_shared([BINS], "int32")
            warp_sums = T.alloc_shared([SELECT_WARPS], "int32")
            above_sums = T.alloc_shared([SELECT_WARPS], "int32")
            equal_sums = T.alloc_shared([SELECT_WARPS], "int32")
            found = T.alloc_shared([2], "int32")
            thread = T.get_thread_binding()
            lane, warp = thread % 32, thread // 32
            row = T.cast(block, "int64")
            first = start[row]
            count = T.max(end[row] - first, 0)
            if count <= k:
                for j in T.serial(T.ceildiv(k, SELECT_THREADS)):
                    slot = j * SELECT_THREADS + thread
                    if slot < k:
                        idx[row, slot] = T.if_then_else(slot < count, first + slot, -1)
            else:
                if thread == 0:
                    found[0] = 0
                    found[1] = k
                radix_pass(scores, row, first, count, histogram, warp_sums, found, 21, 11, thread)
                radix_pass(scores, row, first, count, histogram, warp_sums, found, 10, 11, thread)
                radix_pass(scores, row, first, count, histogram, warp_sums, found, 0, 10, thread)
                threshold = T.alloc_var("uint32", init=T.reinterpret(found[0], "uint32"))
                need = T.alloc_var("int32", init=found[1])
                part = T.ceildiv(count, SELECT_THREADS * LOADS) * (32 * LOADS)
                value = T.alloc_local([LOADS], "uint32")
                above_count = T.alloc_var("int32", init=0)
                equal_count = T.alloc_var("int32", init=0)
                for j in T.serial(part // (32 * LOADS)):
                    u = warp * part + j * 32 * LOADS + lane
                    load_keys(scores, row, first, count, u, 32, value)
                    for v in T.unroll(LOADS):
                        above_count += T.cast(value[v] > threshold, "int32")
                        equal_count += T.cast(u + v * 32 < count and value[v] == threshold, "int32")
                above_before = T.alloc_var("int32", init=warp_base(above_count, above_sums, lane, warp))
                equal_before = T.alloc_var("int32", init=warp_base(equal_count, equal_sums, lane, warp))
                before = (T.uint32(1) << T.cast(lane, "uint32")) - T.uint32(1)
                for j in T.serial(part // (32 * LOADS)):
                    u = warp * part + j * 32 * LOADS + lane
                    load_keys(scores, row, first, count, u, 32, value)
                    for v in T.unroll(LOADS):
                        is_above = value[v] > threshold
                        is_equal = u + v * 32 < count and value[v] == threshold
                        above_mask = T.cast(T.ballot(is_above), "uint32")
                        equal_mask = T.cast(T.ballot(is_equal), "uint32")
                        rank = equal_before + T.cast(T.popcount(equal_mask & before), "int32")
                        if is_above or (is_equal and rank < need):
                            slot = above_before + T.cast(T.popcount(above_mask & before), "int32") + T.min(rank, need)
                            idx[row, slot] = first + u + v * 32
                        above_before += T.cast(T.popcount(above_mask), "int32")
                        equal_before += T.cast(T.popcount(equal_mask), "int32")

    return indexer_top_k
