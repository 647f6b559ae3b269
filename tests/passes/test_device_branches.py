"""What transformers' code does only off the CPU (it counts integer ids), traced on meta tensors: no GPU is needed."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from moe_compiler import device, torch_private
from moe_compiler.testing import run_passes
from tests.moe_compiler.blocks import qwen3_block


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_the_branch_for_accelerators_matches(implementation, monkeypatch):
    monkeypatch.setattr(device, "why_left_alone", lambda kind, dtype: "")
    block = qwen3_block(torch.bfloat16, implementation)
    shapes = {name: tensor.shape for name, tensor in block.state_dict().items()}
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        operands = [
            torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in [(1, 40, 32), *shapes.values()]
        ]

    def call(x, *parameters):
        return torch.func.functional_call(block, dict(zip(shapes, parameters, strict=True)), (x,))

    graph = torch_private.make_fx_pre_dispatch(call, mode, operands)
    _, report = run_passes(graph, ["canonicalize", "find_moe", "raise_moe"])
    (match,) = report.matches
    assert match.formulation == implementation and match.router is not None
