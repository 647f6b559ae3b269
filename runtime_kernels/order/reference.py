"""Ordering of the (token, expert) pairs by expert, in plain torch.

    perm int32 [S]      perm[r] = pair (t * K + j) of the r-th row; stable: pairs of an expert keep their order
    starts int32 [E+1]  rows starts[e] .. starts[e+1] belong to expert e
Pairs whose id lies outside [0, E) come last, past starts[E]: no expert computes them.

For many pairs a device splits the work in two kernels: `order_count` counts the pairs of each expert in blocks of
ORDER_BLOCK pairs, `order_scatter` turns the counts into places.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

ORDER_BLOCK = 1024
# Above this many pairs two kernels with many programs beat one kernel with one.
ORDER_FEW = 4096


def order_blocks(pairs: int) -> int:
    """B: the number of blocks of ORDER_BLOCK pairs (also for a symbolic number)."""
    return (pairs + ORDER_BLOCK - 1) // ORDER_BLOCK


def expert_rows(starts: Tensor) -> Iterator[tuple[int, int, int]]:
    """(expert, first row, end row) of every expert that has rows."""
    for expert, (begin, end) in enumerate(pairwise(starts.tolist())):
        if begin != end:
            yield expert, begin, end


def _keys(ids: Tensor, num_experts: int) -> Tensor:
    """Expert of each pair as int64 [S], num_experts where out of range."""
    # Below zero becomes -1, and modulo E + 1 that is E, as what lies above is.
    return ids.reshape(-1).to(torch.int64).clamp(-1, num_experts).remainder_(num_experts + 1)


def order(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """ids [T,K] integers -> perm int32 [S], starts int32 [E+1]."""
    keys = _keys(ids, num_experts)
    # Sorting 16-bit keys takes about half the time of 64-bit ones.
    narrow = keys.to(torch.int16) if num_experts < 2**15 else keys
    ordered, perm = torch.sort(narrow, stable=True)
    experts = torch.arange(num_experts + 1, dtype=narrow.dtype, device=narrow.device)
    return perm.to(torch.int32), torch.searchsorted(ordered, experts, out_int32=True)


def order_count(ids: Tensor, num_experts: int) -> Tensor:
    """ids [T,K] integers -> counts int32 [B,E]: pairs of each expert in each block of ORDER_BLOCK pairs."""
    keys = _keys(ids, num_experts)
    blocks = order_blocks(keys.shape[0])
    block = torch.arange(keys.shape[0], device=keys.device) // ORDER_BLOCK
    width = num_experts + 1
    counts = torch.bincount(block * width + keys, minlength=blocks * width).view(blocks, width)
    return counts[:, :num_experts].to(torch.int32)


def order_scatter(ids: Tensor, counts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """ids [T,K], counts int32 [B,E] -> perm, starts as `order` gives them."""
    keys = _keys(ids, num_experts)
    pairs = torch.arange(keys.shape[0], device=keys.device)
    starts = F.pad(torch.cumsum(counts.sum(0), 0), (1, 0)).to(torch.int32)
    # Row of a pair: where its expert starts, plus the pairs of that expert in earlier blocks, plus those before it
    # in its own block. The pairs out of range of a block are what its counts leave over.
    sizes = torch.full((counts.shape[0],), ORDER_BLOCK, device=keys.device)
    if counts.shape[0]:
        sizes[-1] = keys.shape[0] - (counts.shape[0] - 1) * ORDER_BLOCK
    full = torch.cat([counts.to(torch.int64), (sizes - counts.sum(1)).unsqueeze(1)], dim=1)
    earlier = torch.cumsum(full, 0) - full
    onehot = F.one_hot(keys, num_experts + 1)
    running = torch.cumsum(onehot, 0) - onehot
    block = pairs // ORDER_BLOCK
    within = running - running[block * ORDER_BLOCK] if keys.shape[0] else running
    rows = starts.to(torch.int64)[keys] + earlier[block, keys] + within.gather(1, keys.unsqueeze(1)).squeeze(1)
    perm = torch.empty_like(keys, dtype=torch.int32)
    perm[rows] = pairs.to(torch.int32)
    return perm, starts
