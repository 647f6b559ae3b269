"""The operator moepdl::combine: weighted (or plain) sum over a token's pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_compiler.runtime_kernels.stage import define_stage


def _allocate(pairs: Tensor, weights: Tensor | None, k: int, dtype: torch.dtype) -> Tensor:
    tokens = pairs.shape[0] // k if weights is None else weights.shape[0]
    return pairs.new_empty((tokens, pairs.shape[1]), dtype=dtype)


define_stage("combine(Tensor pairs, Tensor? weights, int k, ScalarType dtype) -> Tensor", _allocate)
