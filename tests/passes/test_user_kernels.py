"""A user's own Triton kernel beside or inside of a block: it has no schema, writes into memory, and must not vanish.

Dynamo makes its node only where there is a GPU, so the node is put into a captured graph by hand.
"""

from __future__ import annotations

import pytest
import torch
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch.fx import Node

from moe_compiler.aliasing import has_effect, mutated_arguments
from moe_compiler.dag import build_dag
from moe_compiler.testing import capture_graph, examples, run_passes

PASSES = ["canonicalize", "find_moe", "raise_moe"]


def block():
    """The captured graph of a block, its tokens and its result."""
    example = examples()["grouped_mm"]()
    module = capture_graph(example.module, *example.inputs(5))
    tokens = next(n for n in module.graph.find_nodes(op="placeholder") if n.meta["val"].shape[0] == 5)
    return module, tokens, module.graph.output_node().all_input_nodes[0]


def user_kernel(after: Node, **tensors: Node) -> Node:
    """A launch of a kernel of the user's on these tensors, as Dynamo records one."""
    arguments = {"kernel_idx": 0, "constant_args_idx": 0, "grid": [(1, 1, 1)], "tma_descriptor_metadata": {}}
    with after.graph.inserting_after(after):
        node = after.graph.call_function(triton_kernel_wrapper_mutation, (), {**arguments, "kwargs": tensors})
    node.meta["val"] = None
    return node


def names(module) -> list[str]:
    return [node.name for node in module.graph.nodes if node.op == "call_function"]


def test_it_writes_what_it_is_given():
    module, tokens, result = block()
    kernel = user_kernel(result, source=tokens, target=result)
    assert mutated_arguments(kernel) == [tokens, result] and has_effect(kernel)
    assert not kernel.is_impure(), "fx knows it now: has_effect may be is_impure again"
    edges = {(a.name, b.name): data["kind"] for a, b, data in build_dag(module.graph).edges(data=True)}
    assert edges["linear", kernel.name] == "war" and edges[result.name, kernel.name] == "raw"


def test_one_behind_a_block_stays():
    module, _, result = block()
    with module.graph.inserting_after(result):
        out = module.graph.call_function(torch.ops.aten.empty_like.default, (result,))
    out.meta = dict(result.meta)
    kernel = user_kernel(out, source=result, target=out)
    module.graph.output_node().args = ((out,),)
    after, report = run_passes(module, PASSES)
    assert sum(match.count for match in report.matches) == 1
    kept = names(after)
    assert kept.index("experts_default") < kept.index(kernel.name)


@pytest.mark.parametrize("what", ["the tokens", "an inner value"])
def test_one_inside_of_a_block_keeps_the_block_from_matching(what):
    module, tokens, _ = block()
    gathered = next(node for node in module.graph.nodes if node.name == "index")
    silu = next(node for node in module.graph.nodes if node.name == "silu")
    kernel = user_kernel(gathered, source=tokens) if what == "the tokens" else user_kernel(silu, source=silu)
    after, report = run_passes(module, PASSES)
    assert not report.matches and kernel.name in names(after)
    (miss,) = report.misses
    assert kernel.name in f"{miss.reason} {miss.node}"
