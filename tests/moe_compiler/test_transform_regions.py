"""Regions of torch.func transforms beside MoE blocks: leaves for the search, and Dynamo's own calls for Inductor."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint

from moe_compiler import torch_private, transform_regions
from moe_compiler.backend import last_reports, moepdl
from moe_compiler.capture import capture, nested_bodies, restore
from moe_compiler.errors import CaptureError
from moe_compiler.graph_file import load_graph
from tests.fast_part import covering
from tests.moe_compiler.blocks import qwen3_block


def _sine_of_rows(x):
    return torch.func.vmap(lambda row: torch.sin(row) * row.mean())(x)


def _nested(x):
    """How transformers builds attention masks: one vmap in another, and tensors of the outside read in both."""
    shift = x.mean()
    return torch.func.vmap(torch.func.vmap(lambda value: value * shift + 1))(x)


def _in_chunks(x):
    return torch.func.vmap(torch.sin, chunk_size=16)(x)


def _gradient(x):
    return torch.func.grad(lambda value: value.sin().sum())(x)


def _tangent(x):
    return torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))[1]


def _hessian_of_a_row(x):
    return x + torch.func.hessian(lambda value: value.sin().sum())(x[0]).sum(0)


TRANSFORMS = [_sine_of_rows, _nested, _in_chunks, _gradient, _tangent, _hessian_of_a_row]


def _graphs(function, *inputs, **kwargs):
    """(captured, Dynamo's own) of a function."""
    found = []

    def backend(module, example_inputs):
        found.append((capture(module, example_inputs), module))
        return module

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True, **kwargs)(*inputs)
    (pair,) = found
    return pair


def _calls(module):
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def _regions(module):
    return [node for node in module.graph.nodes if node.target is transform_regions.TRANSFORM_REGION]


def _transforms(module):
    return [target for target in _calls(module) if torch_private.is_transform_call(target)]


@pytest.mark.parametrize(("transform", "training"), covering(TRANSFORMS, [False, True]))
def test_a_block_beside_a_transform_is_rewritten(transform, training):
    block = qwen3_block()

    def function(x):
        return transform(block(transform(x[0])[None])[0])

    x = torch.randn(1, 37, 32, requires_grad=training)
    torch._dynamo.reset()
    ours = torch.compile(
        function, backend=moepdl, fullgraph=True, options={"remainder": "eager", "require_match": True}
    )
    with torch.set_grad_enabled(training):
        out, eager = ours(x), function(x)
    torch.testing.assert_close(out, eager, rtol=1e-4, atol=1e-5)
    if training:
        leaves = [x, *block.parameters()]
        for mine, theirs in zip(
            torch.autograd.grad(out.square().sum(), leaves),
            torch.autograd.grad(eager.square().sum(), leaves),
            strict=True,
        ):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert [match.left_alone for match in last_reports()[-1].matches] == [""]


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_the_calls_of_a_transform_are_put_back_as_dynamo_recorded_them(transform):
    traced, dynamo = _graphs(transform, torch.randn(37, 32))
    assert _regions(traced) and not _transforms(traced)
    restore(traced)
    traced.graph.lint()
    assert not _regions(traced) and _transforms(traced) == _transforms(dynamo)
    assert not [name for name, _ in traced.named_children()]
    x = torch.randn(37, 32)
    torch.testing.assert_close(traced(x)[0], transform(x))


def test_a_region_has_the_users_line_and_its_results_their_own_sizes():
    traced, _ = _graphs(_sine_of_rows, torch.randn(37, 32), dynamic=True)
    (region,) = _regions(traced)
    assert "test_transform_regions.py" in region.meta["stack_trace"]
    (result,) = region.users
    (place,) = [n for n in traced.graph.find_nodes(op="placeholder") if isinstance(n.meta["val"], torch.Tensor)]
    assert isinstance(result.meta["val"].shape[0], torch.SymInt)
    assert result.meta["val"].shape == place.meta["val"].shape


def test_what_is_made_of_a_dynamic_size_inside_of_a_region_is_right_at_other_sizes():
    block = qwen3_block()

    def function(x):
        return block(_sine_of_rows(x[0])[None])

    ours = torch.compile(
        function, backend=moepdl, fullgraph=True, dynamic=True, options={"remainder": "eager", "require_match": True}
    )
    with torch.no_grad():
        for tokens in (37, 5, 64):
            x = torch.randn(1, tokens, 32)
            torch.testing.assert_close(ours(x), function(x))


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
def test_inductor_compiles_the_regions(training):
    block = qwen3_block()

    def function(x):
        return block(_nested(x[0])[None]) + _gradient(x)

    x = torch.randn(1, 37, 32, requires_grad=training)
    ours = torch.compile(function, backend=moepdl, fullgraph=True, options={"require_match": True})
    with torch.set_grad_enabled(training):
        torch.testing.assert_close(ours(x), function(x))


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
def test_jamba_whose_scan_over_the_tokens_is_a_tree_of_vmaps(training):
    pytest.importorskip("transformers", minversion="5.20")
    from benchmarks.coverage.classes import build, find_experts

    built = build(next(experts for experts in find_experts() if experts.name == "JambaExperts"))
    ours = torch.compile(
        built.model, backend=moepdl, fullgraph=True, options={"remainder": "eager", "require_match": 2}
    )
    with torch.set_grad_enabled(training):
        out, eager = (model(**built.inputs).logits for model in (ours, built.model))
    torch.testing.assert_close(out, eager, rtol=1e-4, atol=1e-5)
    if training:
        parameters = dict(built.model.named_parameters())
        mine, theirs = (
            torch.autograd.grad(result.square().mean(), list(parameters.values()), allow_unused=True)
            for result in (out, eager)
        )
        for name, a, b in zip(parameters, mine, theirs, strict=True):
            assert (a is None) == (b is None), name
            if a is not None:
                assert (a - b).norm() <= 1e-4 * b.norm() + 1e-8, name


def test_a_region_inside_of_an_activation_checkpoint():
    block = qwen3_block()

    def function(x):
        return torch.utils.checkpoint.checkpoint(lambda h: block(_sine_of_rows(h[0])[None]), x, use_reentrant=False)

    x = torch.randn(1, 37, 32, requires_grad=True)
    traced, _ = _graphs(function, x)
    (body,) = nested_bodies(traced)
    assert len(_regions(body)) == 1
    ours = torch.compile(
        function, backend=moepdl, fullgraph=True, options={"remainder": "eager", "require_match": True}
    )
    out, eager = ours(x), function(x)
    torch.testing.assert_close(out, eager, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x), torch.autograd.grad(eager.sum(), x))


def test_a_block_inside_of_a_transform_is_named_in_the_report():
    router, weight = torch.randn(8, 32), torch.randn(8, 32, 32)

    def experts(x):
        values, ids = torch.topk(torch.softmax(x @ router.T, -1), 2)
        return torch.einsum("ko,k->o", (weight[ids] @ x[:, None])[..., 0], values)

    x = torch.randn(9, 32)
    torch._dynamo.reset()
    ours = torch.compile(lambda x: torch.func.vmap(experts)(x), backend=moepdl, options={"remainder": "eager"})
    torch.testing.assert_close(ours(x), torch.func.vmap(experts)(x))
    (note,) = last_reports()[-1].notes
    assert note.startswith("a top-k in a body of transform_region was not looked at") and "test_transform" in note


def _escapes(x):
    """jacrev asks for gradients of values of a level that it has left."""
    return torch.func.jacrev(torch.sin)(x[0]).sum() + x


def _writes(x):
    kept = x.clone()
    torch.func.vmap(lambda row: row.add_(1))(kept)
    return kept


def _passes_on(x):
    return torch.func.vmap(lambda row: row[:4])(x).add_(1) + x[:, :4]


def _twice(x):
    once, again = torch.func.vmap(lambda row: (row.sin(),) * 2)(x)
    return once.add_(1) + again


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (_escapes, "a value inside of the transform is used behind it"),
        (_writes, "it writes into a tensor that it is given"),
        (_passes_on, "a result shares its memory with another tensor"),
        (_twice, "a result shares its memory with another tensor"),
    ],
)
def test_a_region_with_more_to_it_than_its_results_leaves_the_graph_to_inductor(function, why):
    x = torch.randn(5, 8)
    torch._dynamo.reset()
    with torch.inference_mode():
        ours = torch.compile(function, backend=moepdl, options={"remainder": "eager"})(x.clone())
        torch.testing.assert_close(ours, function(x.clone()))
    (note,) = last_reports()[-1].notes
    assert why in note and "test_transform_regions.py:" in note
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0


def test_a_transform_that_is_not_left_is_refused():
    _, dynamo = _graphs(_sine_of_rows, torch.randn(5, 8))
    last = [node for node in dynamo.graph.nodes if torch_private.transform_step(node.target) < 0][-1]
    dynamo.graph.erase_node(last)
    with pytest.raises(CaptureError, match="it is not entered and left in the same graph"):
        transform_regions.outline(dynamo)


@pytest.mark.parametrize("transform", [_nested, _gradient, _tangent, _hessian_of_a_row])
def test_a_region_that_fails_midway_leaves_no_transform_active(transform):
    """At each of its operators in turn."""
    _, dynamo = _graphs(transform, torch.randn(5, 8))
    outlined = transform_regions.outline(dynamo)
    (region,) = _regions(outlined)
    body = getattr(outlined, region.args[0].target)
    operands = [torch.randn(node.meta["example_value"].shape) for node in region.args[1:]]

    def fail(*args, **kwargs):
        raise ArithmeticError("midway")

    steps = (torch_private.transform_step, torch_private.hooks_step, torch_private.is_transform_switch)
    calls = [node for node in body.graph.nodes if node.op in ("call_function", "call_method")]
    for node in [node for node in calls if not any(step(node.target) for step in steps)]:
        before = node.op, node.target
        node.op, node.target = "call_function", fail
        with pytest.raises(ArithmeticError):
            transform_regions.run(body, operands, "")
        node.op, node.target = before
        assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0, before
        assert torch._C._is_fwd_grad_enabled()
        torch.randn(3, requires_grad=True).sin().sum().backward()
        with torch.autograd.graph.save_on_cpu():
            pass


def test_a_dump_of_a_graph_with_a_region_runs(tmp_path):
    block = qwen3_block()

    def function(x):
        return block(_nested(x[0])[None])

    x = torch.randn(1, 37, 32)
    torch._dynamo.reset()
    options = {"remainder": "eager", "dump": str(tmp_path)}
    with torch.no_grad():
        torch.compile(function, backend=moepdl, fullgraph=True, options=options)(x)
    (path,) = [path for path in tmp_path.rglob("*.py") if "captured" in path.name]
    assert "torch.ops.higher_order.transform_region" in path.read_text()
    graph = load_graph(path)
    assert len(_regions(graph)) == 1
