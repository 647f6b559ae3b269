"""Programs of a block that is given by its sizes alone compute what the operators do."""

from __future__ import annotations

import pytest
import torch

import moe_compiler.runtime_kernels.register  # noqa: F401 - defines the operators
from moe_compiler.block_program import BlockSizes, forward_program, weights_of

ops = torch.ops.moepdl
SIZES = BlockSizes(8, 2, 64, 32, dtype=torch.float32)


@pytest.mark.parametrize("router", [True, False])
@pytest.mark.parametrize("tokens", [1, 37])
def test_forward(tokens, router):
    torch.manual_seed(0)
    weights = {name: [t.normal_(std=0.1) for t in tensors] for name, tensors in weights_of(SIZES, "cpu").items()}
    x = torch.randn(tokens, SIZES.hidden)
    scores, ids = (x @ weights["router"][0].t()).softmax(-1).topk(SIZES.k)
    scores /= scores.sum(-1, keepdim=True)
    first = [weights["router"][0].t()] if router else [ids, scores]
    operands = [x, *first, *weights["gate"], *weights["down"]]
    (y,) = ops.chain(operands, forward_program(SIZES, router=router).to_text())
    projections = (weights["gate"], [], weights["down"], [], [], [])
    want = ops.experts(x, ids, scores, *projections, "silu", True, "output", torch.float32)
    torch.testing.assert_close(y, want)
