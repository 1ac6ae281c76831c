"""Attention of a decode step on an NVIDIA GPU: one pass over each row's own columns.

By hand, the step is six kernels, writes its scores to memory, and reads the longest row's columns for every row. Here a
block takes a chunk of the columns of one row and key head, for all query heads of that group, with a running softmax;
a second kernel joins the chunks (flash decoding, Dao et al. 2023). A row costs its own length, whatever the others'.
Quantized columns are unpacked in registers, so that they are read as packed as they are.

On an H200, 36 layers of 8 key heads, dim 128, bfloat16: see docs/performance.md.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from lanes.cuda_kernel import Kernel

THREADS = 128
CHUNK_SIZES = (512, 256, 128, 64)
# Eight for each of an H200's 132 processors, some of which find that their row is shorter and have nothing to do.
ENOUGH_BLOCKS = 1056
# Columns that a thread has under way: what hides the memory's latency.
UNROLL = 4

# How a thread gets its E elements of a column's key and value, which is number `cell` of all columns of all heads. The
# column that the step adds is not there yet: it comes from the new ones, and is put there.
LOAD_PLAIN = """
            const T* key = is_new ? &new_keys[(size_t)blockIdx.x * DIM] : &keys[cell * DIM];
            const T* value = is_new ? &new_values[(size_t)blockIdx.x * DIM] : &values[cell * DIM];
            #pragma unroll
            for (int e = 0; e < E; e += 16 / sizeof(T)) {
                const int at = lane * E + e;
                const uint4 of_key = *reinterpret_cast<const uint4*>(&key[at]);
                const uint4 of_value = *reinterpret_cast<const uint4*>(&value[at]);
                *reinterpret_cast<uint4*>(&k[u][e]) = of_key;
                *reinterpret_cast<uint4*>(&v[u][e]) = of_value;
                if (is_new) {
                    *reinterpret_cast<uint4*>(const_cast<T*>(&keys[cell * DIM + at])) = of_key;
                    *reinterpret_cast<uint4*>(const_cast<T*>(&values[cell * DIM + at])) = of_value;
                }
            }
"""
LOAD_PACKED = """
            constexpr int IN_WORD = 32 / BITS;
            constexpr int WORDS = DIM / IN_WORD;
            constexpr int DIM_GROUPS = DIM / GROUP_SIZE;
            const int word = lane * E / IN_WORD, of_group = lane * E / GROUP_SIZE;
            const size_t word_from = (is_new ? blockIdx.x : cell) * WORDS + word;
            const size_t group_from = (is_new ? blockIdx.x : cell) * DIM_GROUPS + of_group;
            const T key_scale = (is_new ? new_key_scales : key_scales)[group_from];
            const T key_bias = (is_new ? new_key_biases : key_biases)[group_from];
            const T value_scale = (is_new ? new_value_scales : value_scales)[group_from];
            const T value_bias = (is_new ? new_value_biases : value_biases)[group_from];
            if (is_new && lane * E % GROUP_SIZE == 0) {
                const size_t to = cell * DIM_GROUPS + of_group;
                const_cast<T&>(key_scales[to]) = key_scale;
                const_cast<T&>(key_biases[to]) = key_bias;
                const_cast<T&>(value_scales[to]) = value_scale;
                const_cast<T&>(value_biases[to]) = value_bias;
            }
            #pragma unroll
            for (int w = 0; w < E / IN_WORD; ++w) {
                const uint32_t of_key = (is_new ? new_keys : keys)[word_from + w];
                const uint32_t of_value = (is_new ? new_values : values)[word_from + w];
                if (is_new) {
                    const_cast<uint32_t&>(keys[cell * WORDS + word + w]) = of_key;
                    const_cast<uint32_t&>(values[cell * WORDS + word + w]) = of_value;
                }
                #pragma unroll
                for (int i = 0; i < IN_WORD; ++i) {
                    const int e = w * IN_WORD + i;
                    const uint32_t key = (of_key >> (i * BITS)) & ((1u << BITS) - 1);
                    const uint32_t value = (of_value >> (i * BITS)) & ((1u << BITS) - 1);
                    k[u][e] = T(float(key_scale) * float(key) + float(key_bias));
                    v[u][e] = T(float(value_scale) * float(value) + float(value_bias));
                }
            }
"""

# One thread group of LANES threads works on one column at a time, each thread on E of its elements. The names in
# capitals are template arguments; T is the type of keys and values.
CHUNK_SOURCE = """
    constexpr int E = DIM / LANES;
    constexpr int GROUPS = THREADS / LANES;
    constexpr int WARPS = THREADS / 32;
    const int lane = threadIdx.x % LANES;
    const int group = threadIdx.x / LANES;
    const int row = blockIdx.x / KV_HEADS;
    const int num_splits = gridDim.y;
    const int count = min(positions[row] + 1, capacity);
    const int added = columns[row];
    const int first = blockIdx.y * chunk_columns;
    const int last = min(count, first + chunk_columns);
    if (first >= last) return;

    float q[SHARED_BY][E], sum[SHARED_BY][E], top[SHARED_BY], total[SHARED_BY];
    const T* my_queries = queries + (size_t)blockIdx.x * SHARED_BY * DIM + lane * E;
    for (int g = 0; g < SHARED_BY; ++g) {
        top[g] = -1e30f;
        total[g] = 0.0f;
        for (int e = 0; e < E; ++e) {
            q[g][e] = float(my_queries[g * DIM + e]) * __int_as_float(SCALE_BITS);
            sum[g][e] = 0.0f;
        }
    }
    for (int at = first; at < last; at += UNROLL * GROUPS) {
        T k[UNROLL][E], v[UNROLL][E];
        bool valid[UNROLL];
        #pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int column = at + u * GROUPS + group;
            valid[u] = column < last;
            const bool is_new = valid[u] && column == added;
            const size_t cell = (size_t)blockIdx.x * capacity + (valid[u] ? column : first);
            LOAD_COLUMN
        }
        #pragma unroll
        for (int g = 0; g < SHARED_BY; ++g) {
            float score[UNROLL], higher = top[g];
            #pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                float dot = 0.0f;
                #pragma unroll
                for (int e = 0; e < E; ++e) dot += q[g][e] * float(k[u][e]);
                #pragma unroll
                for (int o = LANES / 2; o > 0; o /= 2) dot += __shfl_xor_sync(0xffffffff, dot, o);
                score[u] = valid[u] ? dot : -INFINITY;
                higher = fmaxf(higher, score[u]);
            }
            const float keep = exp2f(top[g] - higher);
            top[g] = higher;
            total[g] *= keep;
            #pragma unroll
            for (int e = 0; e < E; ++e) sum[g][e] *= keep;
            #pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const float weight = exp2f(score[u] - higher);
                total[g] += weight;
                #pragma unroll
                for (int e = 0; e < E; ++e) sum[g][e] += weight * float(v[u][e]);
            }
        }
    }

    // Join the groups of a warp through its registers, then the warps through shared memory.
    __shared__ float warp_sum[WARPS][SHARED_BY][DIM];
    __shared__ float warp_top[WARPS][SHARED_BY], warp_total[WARPS][SHARED_BY];
    const int warp = threadIdx.x / 32;
    for (int g = 0; g < SHARED_BY; ++g) {
        for (int o = LANES; o < 32; o *= 2) {
            const float other_top = __shfl_xor_sync(0xffffffff, top[g], o);
            const float other_total = __shfl_xor_sync(0xffffffff, total[g], o);
            const float higher = fmaxf(top[g], other_top);
            const float mine = exp2f(top[g] - higher), others = exp2f(other_top - higher);
            for (int e = 0; e < E; ++e)
                sum[g][e] = sum[g][e] * mine + __shfl_xor_sync(0xffffffff, sum[g][e], o) * others;
            total[g] = total[g] * mine + other_total * others;
            top[g] = higher;
        }
        if (threadIdx.x % 32 < LANES) {
            for (int e = 0; e < E; ++e) warp_sum[warp][g][lane * E + e] = sum[g][e];
            warp_top[warp][g] = top[g];
            warp_total[warp][g] = total[g];
        }
    }
    __syncthreads();
    const size_t chunk = (size_t)blockIdx.x * num_splits + blockIdx.y;
    for (int i = threadIdx.x; i < SHARED_BY * DIM; i += THREADS) {
        const int g = i / DIM, d = i % DIM;
        float higher = warp_top[0][g];
        for (int w = 1; w < WARPS; ++w) higher = fmaxf(higher, warp_top[w][g]);
        float joined = 0.0f, weight = 0.0f;
        for (int w = 0; w < WARPS; ++w) {
            const float factor = exp2f(warp_top[w][g] - higher);
            joined += warp_sum[w][g][d] * factor;
            weight += warp_total[w][g] * factor;
        }
        chunk_sum[chunk * SHARED_BY * DIM + i] = joined;
        if (d == 0) {
            chunk_stats[(chunk * SHARED_BY + g) * 2] = higher;
            chunk_stats[(chunk * SHARED_BY + g) * 2 + 1] = weight;
        }
    }
"""

# A block joins the chunks of one row and query head, a thread for each element.
JOIN_SOURCE = """
    const int head = blockIdx.x % SHARED_BY;
    const int row_and_key_head = blockIdx.x / SHARED_BY;
    const int count = positions[row_and_key_head / KV_HEADS] + 1;
    const int chunks = min((count + chunk_columns - 1) / chunk_columns, splits);
    const int d = threadIdx.x;
    float top = -1e30f, sum = 0.0f, total = 0.0f;
    for (int c = 0; c < chunks; ++c) {
        const size_t at = ((size_t)row_and_key_head * splits + c) * SHARED_BY + head;
        const float other_top = chunk_stats[at * 2];
        const float higher = fmaxf(top, other_top);
        const float mine = exp2f(top - higher), others = exp2f(other_top - higher);
        sum = sum * mine + chunk_sum[at * DIM + d] * others;
        total = total * mine + chunk_stats[at * 2 + 1] * others;
        top = higher;
    }
    attended[(size_t)blockIdx.x * DIM + d] = T(sum / total);
"""


@dataclass(frozen=True, slots=True)
class Packing:
    """How quantized columns are packed: so many bits an element, a scale and a bias for each group."""

    group_size: int
    bits: int


def lanes_per_column(
    heads: int, kv_heads: int, dim: int, dtype: mx.Dtype, packing: Packing | None = None
) -> int | None:
    """Threads that share a column, each on as many elements as fill 16 bytes unpacked, or several times that; None if
    the kernel is not for such heads.

    A thread holds dim / lanes elements of each query of the group, and of their sums. Packed ones are whole words, of
    one group.
    """
    load = 16 // dtype.size
    lanes = min(32, dim // load)
    fits = lanes in (4, 8, 16, 32) and dim % (lanes * load) == 0 and dim // lanes * (heads // kv_heads) <= 64
    if fits and packing:
        fits = dim // lanes * packing.bits % 32 == 0 and packing.group_size % (dim // lanes) == 0
    return lanes if fits else None


def _chunk_kernel(name: str, parts: Sequence[str], load: str) -> Kernel:
    inputs = ("queries", *parts, *(f"new_{part}" for part in parts), "columns", "positions")
    source = CHUNK_SOURCE.replace("LOAD_COLUMN", load)
    return Kernel(name, inputs, ("chunk_sum", "chunk_stats"), ("capacity", "chunk_columns"), source)


PACKED_PARTS = ("keys", "key_scales", "key_biases", "values", "value_scales", "value_biases")
CHUNK = _chunk_kernel("attend_chunk", ("keys", "values"), LOAD_PLAIN)
PACKED_CHUNK = _chunk_kernel("attend_packed_chunk", PACKED_PARTS, LOAD_PACKED)
JOIN = Kernel(
    "attend_join", ("chunk_sum", "chunk_stats", "positions"), ("attended",), ("splits", "chunk_columns"), JOIN_SOURCE
)


def attend_own_columns(
    queries: mx.array,
    parts: Sequence[mx.array],
    new: Sequence[mx.array],
    columns: mx.array,
    positions: mx.array,
    scale: float,
    read_width: int,
    packing: Packing | None = None,
) -> mx.array:
    """queries [rows, heads, 1, dim] over the first positions[row] + 1 columns of keys and values [slots, kv_heads,
    capacity, dim], which are the two parts; of a packing, six: each packed, its scales and its biases.

    new: a part of each row's own, [rows, kv_heads, 1, ...], that is written into column columns[row] of these very
    arrays: MLX is not told, so that whoever reads them has to come after what is returned here. Once more with the same
    changes nothing. positions: int32 [rows], as columns; a ring that has wrapped may name any beyond its capacity.
    read_width: at least as many columns as the longest row has.
    """
    rows, heads, _, dim = queries.shape
    kv_heads, capacity = parts[0].shape[1:3]
    dtype = parts[1].dtype  # that of the values, or of scales
    lanes = lanes_per_column(heads, kv_heads, dim, dtype, packing)
    assert lanes is not None, f"{heads} heads over {kv_heads} of {dim} {dtype} {packing}: not for this kernel"
    chunk_columns = columns_of_chunk(rows * kv_heads, min(read_width, capacity))
    splits = -(-min(read_width, capacity) // chunk_columns)
    shared_by = heads // kv_heads
    constants: dict[str, Any] = {"T": dtype, "DIM": dim, "KV_HEADS": kv_heads, "SHARED_BY": shared_by}
    scale_bits = struct.unpack("i", struct.pack("f", scale * math.log2(math.e)))[0]
    layout = {"BITS": packing.bits, "GROUP_SIZE": packing.group_size} if packing else {}
    sums, stats = (PACKED_CHUNK if packing else CHUNK)(
        [queries, *parts, *new, columns, positions],
        (capacity, chunk_columns),
        constants | layout | {"LANES": lanes, "THREADS": THREADS, "UNROLL": UNROLL, "SCALE_BITS": scale_bits},
        blocks=(rows * kv_heads, splits),
        threads=THREADS,
        shapes=[(rows * kv_heads, splits, shared_by, dim), (rows * kv_heads, splits, shared_by, 2)],
        dtypes=[mx.float32, mx.float32],
    )
    (attended,) = JOIN(
        [sums, stats, positions],
        (splits, chunk_columns),
        constants,
        blocks=(rows * heads, 1),
        threads=dim,
        shapes=[queries.shape],
        dtypes=[queries.dtype],
    )
    return attended


def columns_of_chunk(rows_and_key_heads: int, columns: int) -> int:
    """As many as leave the device enough blocks to do."""
    fitting = (size for size in CHUNK_SIZES if rows_and_key_heads * -(-columns // size) >= ENOUGH_BLOCKS)
    return next(fitting, CHUNK_SIZES[-1])
