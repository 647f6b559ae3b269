"""The rows that experts work on, in plain torch: which token and which routing weight each has, and their sums."""

from __future__ import annotations

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_compiler.runtime_kernels.activations import wide


class SortedRows:
    """One row for each (token, expert) pair, in sorted order; pairs of ids out of range come last and are not used."""

    def __init__(self, x: Tensor, weights: Tensor, perm: Tensor, weight_at: str) -> None:
        self.x = x
        self.weights = weights
        self.pairs = perm.to(torch.int64)
        self.tokens = torch.div(self.pairs, weights.shape[1], rounding_mode="floor")
        self.weight_at_input = weight_at == "input"

    @cached_property
    def scale(self) -> Tensor:
        """The routing weight of each row, [S,1] in the wide dtype."""
        return self.weights.reshape(-1).index_select(0, self.pairs).to(wide(self.x.dtype)).unsqueeze(1)

    def inputs(self, begin: int = 0, end: int | None = None) -> Tensor:
        """What the first matmul sees."""
        rows = self.x.index_select(0, self.tokens[begin:end])
        if self.weight_at_input:
            rows = (rows.to(self.scale.dtype) * self.scale[begin:end]).to(self.x.dtype)
        return rows

    def sums(self, rows: Tensor, known: int, dtype: torch.dtype, *, weighted: bool) -> Tensor:
        """rows [S,H], the first `known` of them read -> the (weighted) sum of each token's rows [T,H], in dtype.

        An embedding bag does it in one pass over the rows: it sums in fp32 (fp64 for fp64) and rounds once.
        """
        if rows.dtype is not dtype or (weighted and self.weights.dtype is not rows.dtype):
            rows = rows.to(wide(rows.dtype))
        every = known == rows.shape[0]
        places = torch.arange(rows.shape[0], device=rows.device)
        row_of_pair = torch.empty_like(self.pairs)
        # Pairs of ids out of range come last and have no row: all of them point to one that is not read.
        row_of_pair[self.pairs] = places if every else places.clamp_(max=known)
        return F.embedding_bag(
            row_of_pair.view(self.weights.shape),
            rows,
            mode="sum",
            per_sample_weights=self.weights.to(rows.dtype) if weighted else None,
            padding_idx=None if every else known,
        ).to(dtype)
