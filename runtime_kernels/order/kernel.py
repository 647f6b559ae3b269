"""Device code of the stable ordering of (token, expert) pairs by expert.

The row of a pair is the number of pairs that sort before it. For few pairs every pair is compared with every other,
which spreads over the whole device and needs neither a scan nor a second kernel. For many, `order_count` counts the
pairs of each expert in blocks, and `order_scatter` sorts each block and adds what the counts of the earlier blocks and
the smaller experts say. Both are deterministic: there are no atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_compiler.runtime_kernels.device import trigger, wait


@triton.jit
def load_experts(ids, pair, S, ID_T: tl.constexpr, ID_K: tl.constexpr, K: tl.constexpr, E: tl.constexpr):
    """int32 expert of each pair, E where the id is out of range; also E past S."""
    if ID_K == 1 and ID_T == K:
        at = pair
    else:
        at = (pair // K).to(tl.int64) * ID_T + (pair % K).to(tl.int64) * ID_K
    expert = tl.load(ids + at, mask=pair < S, other=E)
    return tl.where((expert >= 0) & (expert < E), expert, E).to(tl.int32)


@triton.jit(do_not_specialize=["S"])
def order_kernel(
    ids,
    perm,
    starts,
    S,
    ID_T: tl.constexpr,
    ID_K: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    BQ: tl.constexpr,
    BS: tl.constexpr,
    PDL: tl.constexpr,
):
    """perm [S], starts [E+1]. A query is a pair, or the first place of an expert; its result the pairs before it."""
    wait(PDL)
    query = tl.program_id(0) * BQ + tl.arange(0, BQ)
    expert = load_experts(ids, query, S, ID_T, ID_K, K, E)
    key = tl.where(query < S, expert * S + query, (query - S) * S)
    before = tl.zeros((BQ, BS), tl.int32)
    for s0 in tl.range(0, S, BS, num_stages=3):
        pair = s0 + tl.arange(0, BS)
        other = load_experts(ids, pair, S, ID_T, ID_K, K, E) * S + pair
        other = tl.where(pair < S, other, 0x7FFFFFFF)
        before += (other[None, :] < key[:, None]).to(tl.int32)
    trigger(PDL)
    rank = tl.sum(before, 1)
    tl.store(perm + rank, query, mask=query < S)
    tl.store(starts + (query - S), rank, mask=(query >= S) & (query - S <= E))


@triton.jit(do_not_specialize=["S"])
def order_count_kernel(
    ids,
    counts,
    S,
    ID_T: tl.constexpr,
    ID_K: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    BE: tl.constexpr,
    BS: tl.constexpr,
    PDL: tl.constexpr,
):
    """counts [B,E]: how many of the BLOCK pairs of block b belong to expert e."""
    wait(PDL)
    WIDTH: tl.constexpr = (E + BE - 1) // BE
    block = tl.program_id(0) // WIDTH
    e = (tl.program_id(0) % WIDTH) * BE + tl.arange(0, BE)
    found = tl.zeros((BE, BS), tl.int32)
    for s0 in tl.static_range(0, BLOCK, BS):
        expert = load_experts(ids, block * BLOCK + s0 + tl.arange(0, BS), S, ID_T, ID_K, K, E)
        found += (expert[None, :] == e[:, None]).to(tl.int32)
    trigger(PDL)
    tl.store(counts + block.to(tl.int64) * E + e, tl.sum(found, 1), mask=e < E)


@triton.jit(do_not_specialize=["S", "B"])
def order_scatter_kernel(
    ids,
    counts,
    perm,
    starts,
    S,
    B,
    ID_T: tl.constexpr,
    ID_K: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    E_POW2: tl.constexpr,
    BLOCK: tl.constexpr,
    BB: tl.constexpr,
    PDL: tl.constexpr,
):
    """perm [S], starts [E+1] from the counts; a program places one block of BLOCK pairs.

    Sorted by expert and place, the i-th pair of the block is the (i - begin of its expert in the block)-th of its
    expert there, and its row follows those of the smaller experts and of the same expert in earlier blocks.
    """
    wait(PDL)
    block = tl.program_id(0)
    e = tl.arange(0, E_POW2)
    i = tl.arange(0, BLOCK)
    pair = block * BLOCK + i
    # Numbers past S come last of all; they have no row.
    keys = tl.where(pair < S, load_experts(ids, pair, S, ID_T, ID_K, K, E) * BLOCK + i, 0x7FFFFFFF)
    mine = tl.load(counts + block.to(tl.int64) * E + e, mask=(e < E) & (block < B), other=0)
    earlier = tl.zeros((E_POW2,), tl.int32)
    total = tl.zeros((E_POW2,), tl.int32)
    for b0 in tl.range(0, B, BB, num_stages=3):
        b = b0 + tl.arange(0, BB)
        some = tl.load(
            counts + b.to(tl.int64)[:, None] * E + e[None, :], mask=(b < B)[:, None] & (e < E)[None, :], other=0
        )
        total += tl.sum(some, 0)
        earlier += tl.sum(tl.where((b < block)[:, None], some, 0), 0)
    trigger(PDL)
    begin = tl.cumsum(total, 0) - total
    shift = begin + earlier - (tl.cumsum(mine, 0) - mine)
    keys = tl.sort(keys, 0)
    expert = keys // BLOCK
    row = i + tl.gather(shift, tl.minimum(expert, E - 1), 0)
    # The pairs out of range begin where the valid ones of all blocks end, after those of the earlier blocks.
    valid = tl.sum(total, 0)
    outside = i - tl.sum(mine, 0) + valid + block * BLOCK - tl.sum(earlier, 0)
    row = tl.where(expert < E, row, outside)
    tl.store(perm + row, block * BLOCK + keys % BLOCK, mask=pair < S)
    if block == 0:
        tl.store(starts + e, begin, mask=e < E)
        tl.store(starts + E, valid)
