"""Routers with a bias for the choice, groups, or a scale for each expert: the spellings of public models agree."""

from __future__ import annotations

import pytest
import torch

from moe_compiler.testing import run_passes
from tests.passes.numerics import compile_eager, raised_agrees
from tests.passes.router_models import ROUTERS, Block, H, deepseek_inference_unbiased

CAPTURE = ["canonicalize", "find_moe", "raise_moe"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_of_a_model_is_raised_and_agrees(name, dtype):
    router, rule, attributes = ROUTERS[name]
    report = raised_agrees(Block(router, dtype), torch.randn(37, H, dtype=dtype))
    (match,) = report.matches
    assert (match.router, match.router_why) == (rule, "")
    assert {key: match.attributes.get(key) for key in attributes} == attributes
    assert report.misses == []


def test_scores_that_are_filled_in_place_without_a_bias_are_raised_without_the_write():
    """Eager cannot differentiate this one, so without gradients. The write goes with the router that it belonged to."""
    module, x = Block(deepseek_inference_unbiased), torch.randn(37, H)
    after, report = run_passes(module, CAPTURE, x)
    (match,) = report.matches
    assert match.router == "R5 softmax, groups, top-k" and match.attributes["fill"] == "-inf"
    assert report.misses == [] and "masked_fill" not in str(after.graph) and "aten.topk" not in str(after.graph)
    with torch.no_grad():
        torch.testing.assert_close(compile_eager(module)(x), module(x))
