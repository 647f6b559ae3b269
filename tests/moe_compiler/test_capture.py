"""Capture: one dialect, and everything that must survive it."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint

from moe_compiler.capture import capture, nested_bodies
from moe_compiler.errors import CaptureError
from moe_compiler.moe_ir import user_line


def captured(function, *inputs, **kwargs):
    """The captured graph of a function, and the Dynamo graph it came from."""
    found = []

    def backend(module, example_inputs):
        found.append((capture(module, example_inputs), module))
        return module

    torch.compile(function, backend=backend, **kwargs)(*inputs)
    (pair,) = found
    return pair


def operators(module):
    return [str(n.target).removeprefix("aten.") for n in module.graph.nodes if n.op == "call_function"]


def test_methods_functions_and_modules_become_aten_before_decomposition():
    linear = torch.nn.Linear(4, 4)
    traced, _ = captured(lambda x: torch.nn.functional.silu(linear(x)).softmax(-1).view(2, 2, 4), torch.randn(4, 4))
    assert operators(traced) == ["linear.default", "silu.default", "softmax.int", "view.default"]


def test_placeholders_keep_what_makes_parameters_static():
    linear = torch.nn.Linear(4, 4)
    traced, dynamo = captured(linear, torch.randn(2, 4))
    before, after = (m.graph.find_nodes(op="placeholder") for m in (dynamo, traced))
    assert traced._param_name_to_source == dynamo._param_name_to_source
    assert traced.meta.get("dynamo_compile_id") == dynamo.meta.get("dynamo_compile_id")
    for old, new in zip(before, after, strict=True):
        assert getattr(new, "_dynamo_source", None) == getattr(old, "_dynamo_source", None)
        assert ("tensor_dict" in new.meta) == ("tensor_dict" in old.meta)


def test_symbolic_sizes_stay_symbolic():
    traced, _ = captured(lambda x: x.reshape(-1, 2) * 2, torch.randn(6, 4), dynamic=True)
    (first,) = [n for n in traced.graph.find_nodes(op="placeholder") if isinstance(n.meta["val"], torch.Tensor)]
    assert all(isinstance(size, torch.SymInt) for size in first.meta["val"].shape)


def test_the_users_line_survives():
    def function(x):
        return torch.sin(x)  # the line a message must name

    traced, _ = captured(function, torch.randn(3))
    (node,) = [n for n in traced.graph.nodes if n.op == "call_function"]
    assert "test_capture.py" in user_line(node) and "torch.sin(x)" in user_line(node)


def test_small_constants_are_written_into_the_graph_and_large_ones_are_buffers():
    traced, _ = captured(lambda x: x + torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3))
    calls = [n for n in traced.graph.nodes if n.target is torch.tensor]
    assert [n.args[0] for n in calls] == [[1.0, 2.0, 3.0]]
    assert not list(traced.buffers())
    torch._dynamo.reset()
    values = list(range(200))
    traced, _ = captured(lambda x: x + torch.tensor(values), torch.zeros(200))
    ((name, buffer),) = traced.named_buffers()
    assert buffer.tolist() == values and name in traced._param_name_to_source


def test_an_activation_checkpoint_is_a_leaf_with_a_body_of_its_own():
    linear = torch.nn.Linear(4, 4)

    def function(x):
        return torch.utils.checkpoint.checkpoint(lambda h: torch.relu(linear(h)), x, use_reentrant=False).sum()

    traced, dynamo = captured(function, torch.randn(2, 4, requires_grad=True))
    assert "tag_activation_checkpoint" in operators(traced)
    (body,) = nested_bodies(traced)
    assert operators(body)[:2] == ["linear.default", "relu.default"]
    (leaf,) = [n for n in traced.graph.nodes if "checkpoint" in str(n.target)]
    (old,) = [n for n in dynamo.graph.nodes if "checkpoint" in str(n.target)]
    assert {k for k in old.meta if k.startswith("_")} <= set(leaf.meta)


def test_what_cannot_be_retraced_is_an_error_with_a_reason():
    module = torch.fx.symbolic_trace(lambda x: x + 1)
    module.register_buffer("extra", torch.ones(2))
    (placeholder,) = module.graph.find_nodes(op="placeholder")
    with module.graph.inserting_after(placeholder):
        attribute = module.graph.get_attr("extra")
    module.graph.output_node().args = (attribute,)
    with pytest.raises(CaptureError, match="reads the tensor attribute 'extra'") as caught:
        capture(module, [torch.ones(2)])
    assert caught.value.why and caught.value.try_


def test_inside_of_an_autocast_region_values_have_the_dtypes_that_eager_gives():
    linear = torch.nn.Linear(4, 4)

    def function(x):
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=True):
            y = linear(x)
        return y, linear(x)

    traced, dynamo = captured(function, torch.randn(2, 4))
    inside, outside = [n for n in traced.graph.nodes if n.target is torch.ops.aten.linear.default]
    assert (inside.meta["val"].dtype, outside.meta["val"].dtype) == (torch.bfloat16, torch.float32)

    def switches(module):
        return [
            (n.target.__name__, n.args if "enter" in n.target.__name__ else ())
            for n in module.graph.nodes
            if n.op == "call_function" and "autocast" in getattr(n.target, "__name__", "")
        ]

    assert switches(traced) == switches(dynamo) and len(switches(traced)) == 2


def cut_by_hand(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Aria in transformers 4: each expert's rows are a slice between two cumulated counts."""
    ends = torch.cat([torch.zeros(1, dtype=torch.long), torch.cumsum(counts, 0)])
    result = torch.zeros(rows.shape[0], weights.shape[-1])
    for e in range(weights.shape[0]):
        result[ends[e] : ends[e + 1]] = rows[ends[e] : ends[e + 1]] @ weights[e]
    return result


def test_slices_cut_by_hand_are_not_captured_in_training_and_the_note_says_where_and_what_helps():
    from moe_compiler.backend import last_reports, moepdl

    rows, weights = torch.randn(6, 4), torch.randn(3, 4, 2, requires_grad=True)
    counts = torch.tensor([2, 0, 4])
    out = torch.compile(cut_by_hand, backend=moepdl, fullgraph=True, options={"remainder": "eager"})(
        rows, weights, counts
    )
    torch.testing.assert_close(out, cut_by_hand(rows, weights, counts))
    (note,) = last_reports()[-1].notes
    assert "test_capture.py:" in note and "result[ends[e] : ends[e + 1]] =" in note
    assert "try: cut rows whose number comes from the data with torch.split" in note


def test_whatever_fails_in_the_retrace_is_an_error_at_the_users_line():
    @torch.library.custom_op("test_capture::fails_when_traced_again", mutates_args=())
    def operator(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @operator.register_fake
    def _(x):
        return torch.empty_like(x)

    def backend(module, example_inputs):
        @operator.register_fake
        def _(x):
            raise TypeError("only once")

        with pytest.raises(CaptureError, match="only once") as caught:
            capture(module, example_inputs)
        assert "test_capture.py:" in caught.value.where and "return operator(x)" in caught.value.where
        assert caught.value.try_.startswith("the graph goes to Inductor unchanged")
        return module

    def function(x):
        return operator(x)

    torch.compile(function, backend=backend)(torch.randn(3))
