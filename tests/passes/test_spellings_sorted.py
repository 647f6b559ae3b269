"""Every formulation of sorted rows and slots in three spellings or more, x dtype x mode x shapes: what must hold.

Exactly one match a block; outputs and gradients within the accuracy rule, a gradient that eager does not give is none;
dtype, shape and strides of the results and of every node as they are; every list of passes at its fixed point.
One combination a spelling runs always, so that each formulation is seen with every dtype, in both modes and in both
kinds of shapes, and every combination somewhere; the rest is marked slow.
"""

from __future__ import annotations

from itertools import product
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from moe_compiler import compilation
from moe_compiler.graph_pass import Context, propagate
from moe_compiler.moe_ir import size_expr
from tests.passes import spellings, spellings_masks, spellings_sorted
from tests.passes.numerics import compile_eager, raised_agrees
from tests.passes.spellings import Block, H
from tests.properties.check import run_phase_twice

NAMES = (
    "grouped_mm", "grouped_scatter", "grouped_top1", "split_linear", "split_experts", "routing_map", "capacity",
    "drop_and_pad",
)  # fmt: skip
SPELLINGS = {**spellings.SPELLINGS, **spellings_sorted.SPELLINGS, **spellings_masks.SPELLINGS}
COMBINATIONS = list(product((torch.float32, torch.bfloat16), (True, False), (False, True)))


def cases() -> list:
    found = []
    for number, name in enumerate(NAMES):
        for place, key in enumerate(SPELLINGS[name]):
            always = (3 * place + number) % len(COMBINATIONS)
            for index, (dtype, training, dynamic) in enumerate(COMBINATIONS):
                words = (str(dtype)[6:], "training" if training else "inference", "dynamic" if dynamic else "static")
                marks = () if index == always else (pytest.mark.slow,)
                found.append(
                    pytest.param(name, key, dtype, training, dynamic, id="-".join((name, key, *words)), marks=marks)
                )
    return found


def layout(value: object) -> object:
    """dtype, sizes and strides of a tensor, or of several."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(map(size_expr, value.shape)), tuple(map(size_expr, value.stride()))
    return tuple(map(layout, value)) if isinstance(value, (list, tuple)) else None


def check_values(module: GraphModule) -> None:
    """Each operator gives what is recorded; one whose size only data decides gives another size each time."""
    for node in module.graph.nodes:
        before = node.meta.get("val")
        if node.op != "call_function" or layout(before) is None:
            continue
        operands = [before, *(source.meta.get("val") for source in node.all_input_nodes)]
        if any(free_unbacked_symbols(value) for value in operands if isinstance(value, Tensor)):
            continue
        propagate(node)
        again, node.meta["val"] = node.meta["val"], before
        assert layout(again) == layout(before), node.format_node()


def run_phase(module: GraphModule, phase: str, context: Context) -> int:
    total = run_phase_twice(module, phase, context)
    check_values(module)
    return total


def test_there_are_three_spellings_of_each_and_all_combinations_always_run():
    assert all(len(SPELLINGS[name]) >= 3 for name in NAMES)
    always = [(case.values[0], case.values[2:]) for case in cases() if not case.marks]
    assert {combination for _, combination in always} == {*COMBINATIONS}
    for name in NAMES:
        seen = [combination for own, combination in always if own == name]
        assert [len({*values}) for values in zip(*seen, strict=True)] == [2, 2, 2], name


@pytest.mark.parametrize(("name", "key", "dtype", "training", "dynamic"), cases())
def test_a_spelling(name: str, key: str, dtype: torch.dtype, training: bool, dynamic: bool):
    module = Block(SPELLINGS[name][key], dtype).requires_grad_(training)
    with mock.patch.object(compilation, "run_phase", run_phase):
        compiled = compile_eager(module, dynamic=dynamic, require_match=1)
        for count in (6, 19) if dynamic else (19,):
            x = torch.randn(count, H, dtype=dtype)
            report = raised_agrees(module, x, compiled=compiled, training=training, repeats=12)
            (match,) = report.matches
            assert match.formulation == name and match.count == 1 and not report.misses
            check_results(module, compiled, x.requires_grad_(training))


def check_results(module: Block, compiled: object, x: Tensor) -> None:
    """Results have eager's layout; gradients are there where eager gives some (their strides are autograd's affair)."""
    plain, ours = module(x), compiled(x)  # type: ignore[operator]
    assert layout(ours) == layout(plain) and ours.requires_grad == plain.requires_grad
    if not plain.requires_grad:
        return
    leaves = [x, *module.parameters()]
    expected, found = (torch.autograd.grad(y.sum(), leaves, allow_unused=True) for y in (plain, ours))
    for mine, eager in zip(found, expected, strict=True):
        assert (mine is None) == (eager is None)
        assert mine is None or (mine.dtype, mine.shape) == (eager.dtype, eager.shape)
