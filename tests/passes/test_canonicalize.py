"""canonicalize: what becomes one spelling, and what must stay because somebody can see it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_compiler.testing import assert_same_graph, canonical_text, capture_graph, run_passes


def after(function, *inputs, dynamic=None):
    return run_passes(function, ["canonicalize"], *inputs, dynamic=dynamic)[0]


def written(module) -> list[str]:
    """The in-place operators of a graph."""
    names = [node.target.__name__ for node in module.graph.nodes if node.op == "call_function"]
    return [name for name in names if name.split(".")[0].endswith("_")]


def test_private_writes_become_new_tensors():
    def before(x: Tensor, token: Tensor) -> Tensor:
        values, _ = torch.topk(x, 2, dim=-1)
        values /= values.sum(-1, keepdim=True)
        return torch.zeros_like(x).index_add_(0, token, x).add_(values.sum())

    def expected(x: Tensor, token: Tensor) -> Tensor:
        values, _ = torch.topk(x, 2, dim=-1)
        values = values / values.sum(-1, keepdim=True)
        return torch.zeros_like(x).index_add(0, token, x).add(values.sum())

    inputs = torch.randn(3, 4), torch.tensor([2, 0, 1])
    assert_same_graph(after(before, *inputs), expected)


def test_casts_reshapes_and_slices_that_change_nothing_disappear():
    def before(x: Tensor) -> Tensor:
        y = x.to(x.dtype).reshape(x.shape).view(x.shape[0], -1)
        return torch.relu(y[:, :, None].squeeze(-1)).float() + 1

    def expected(x: Tensor) -> Tensor:
        return torch.relu(x.unsqueeze(2).squeeze(-1)) + 1

    for dynamic in (None, True):
        assert_same_graph(after(before, torch.randn(3, 4), dynamic=dynamic), _sized(expected, dynamic))


def _sized(function, dynamic):
    """With symbolic sizes the sizes themselves are inputs of the graph, ahead of the tensor."""
    return function if dynamic is None else lambda *inputs: function(inputs[-1])


def test_a_slice_that_takes_something_away_stays():
    def before(x: Tensor) -> Tensor:
        return torch.relu(x[1:]) + torch.relu(x[::2]) + torch.relu(x[:2])

    module = after(before, torch.randn(3, 4)[:3].repeat(1, 1)[:3])
    kept = [node for node in module.graph.nodes if "slice" in str(node.target)]
    assert len(kept) == 3


def test_a_chain_of_private_writes_becomes_new_tensors_throughout():
    def before(x: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for row in range(3):
            result.index_add_(0, torch.arange(row + 1), x[: row + 1])
        return result

    module = after(before, torch.randn(3, 4))
    assert written(module) == []
    x = torch.randn(3, 4)
    torch.testing.assert_close(module(x)[0], before(x))


def test_results_are_numbered_from_the_first():
    def before(x: Tensor) -> Tensor:
        parts = x.chunk(2, dim=-1)
        return torch.relu(parts[-2]) * parts[-1]

    def expected(x: Tensor) -> Tensor:
        parts = x.chunk(2, dim=-1)
        return torch.relu(parts[0]) * parts[1]

    assert_same_graph(after(before, torch.randn(3, 4)), expected)


# What stays


def test_a_write_into_an_input_stays():
    def before(x: Tensor) -> Tensor:
        x.mul_(2)
        return x + 1

    assert written(after(before, torch.randn(3, 4))) == ["mul_.Tensor"]


def test_a_write_into_a_view_of_an_input_stays():
    def before(x: Tensor) -> Tensor:
        x.view(-1)[:2].zero_()
        return x + 1

    assert written(after(before, torch.randn(3, 4))) == ["zero_.default"]


def test_a_write_that_another_name_shows_stays():
    def before(x: Tensor) -> Tensor:
        held = x * 2
        alias = held.view(-1)
        held.add_(1)
        return alias.sum() + held

    assert written(after(before, torch.randn(3, 4))) == ["add_.Tensor"]


def test_a_write_through_a_view_that_its_base_shows_stays():
    def before(x: Tensor) -> Tensor:
        held = x * 2
        held[0].add_(1)
        return held.sum()

    assert written(after(before, torch.randn(3, 4))) == ["add_.Tensor"]


def test_a_write_that_keeps_a_narrower_dtype_stays():
    """bf16 += fp32 keeps bf16; the operator that returns a new tensor would give fp32."""

    def before(x: Tensor, wide: Tensor) -> Tensor:
        held = x * 2
        held += wide
        return held

    inputs = torch.randn(3, 4, dtype=torch.bfloat16), torch.randn(3, 4)
    module = after(before, *inputs)
    assert written(module) == ["add_.Tensor"]
    assert module(*inputs)[0].dtype == torch.bfloat16


def test_a_cast_of_memory_that_is_written_later_stays():
    """x.float() of a float tensor is x itself: whoever writes into it writes into x."""

    def before(x: Tensor) -> Tensor:
        same = x.view(x.shape)
        same.add_(1)
        return x * 2

    module, x = after(before, torch.randn(3, 4)), torch.randn(3, 4)
    expected = (x + 1) * 2
    torch.testing.assert_close(module(x.clone())[0], expected)


def test_an_output_stays_a_node_of_its_own():
    """Returning a view of an input is not returning the input."""

    def before(x: Tensor) -> Tensor:
        return x.view(x.shape)

    module = after(before, torch.randn(3, 4))
    assert [node.op for node in module.graph.nodes] == ["placeholder", "call_function", "output"]


def test_a_copying_cast_stays():
    def before(x: Tensor) -> Tensor:
        copied = x.to(torch.float32, copy=True)
        return copied + 1

    module = after(before, torch.randn(3, 4))
    assert any("to" in str(node.target) for node in module.graph.nodes if node.op == "call_function")


def test_zero_rewrites_leave_the_graph_as_it_is():
    def before(x: Tensor) -> Tensor:
        return torch.relu(x) @ x.t()

    module = capture_graph(before, torch.randn(3, 4))
    text = str(module.graph)
    unchanged, report = run_passes(module, ["canonicalize"])
    assert str(unchanged.graph) == text
    assert report.passes[0].rewrites == 0 and report.status == "unchanged"


# The comparison itself


def test_graphs_are_compared_by_what_they_compute():
    def one(x: Tensor, y: Tensor) -> Tensor:
        a, b = torch.relu(x), torch.sigmoid(y)
        return torch.add(a, b, alpha=1)

    def other(x: Tensor, y: Tensor) -> Tensor:
        _ = x * 3  # dead, but now x is the first input: Dynamo orders inputs by first use
        b = torch.sigmoid(y)
        return torch.relu(x) + b

    inputs = torch.randn(3), torch.randn(3)
    assert_same_graph(capture_graph(one, *inputs), capture_graph(other, *inputs))
    assert_same_graph(capture_graph(one, *inputs), other)
    assert canonical_text(capture_graph(one, *inputs)) == canonical_text(capture_graph(other, *inputs))


def test_a_difference_is_shown_as_a_diff():
    with pytest.raises(AssertionError, match=r"(?s)--- expected.*\+%1.*sigmoid"):
        assert_same_graph(capture_graph(torch.sigmoid, torch.randn(3)), torch.relu)


def test_the_order_of_a_read_and_a_write_is_a_difference():
    def read_first(x: Tensor) -> Tensor:
        held = x * 2
        alias = held.view(-1)
        before = alias.sum()
        held.add_(1)
        return before + held + alias.mean()

    def write_first(x: Tensor) -> Tensor:
        held = x * 2
        alias = held.view(-1)
        held.add_(1)
        before = alias.sum()
        return before + held + alias.mean()

    with pytest.raises(AssertionError, match="after 1 writes"):
        assert_same_graph(capture_graph(read_first, torch.randn(3)), write_first)


def test_a_choice_of_one_keeps_its_dimension():
    def before(scores: Tensor, table: Tensor) -> Tensor:
        values, ids = scores.max(-1)
        return table[scores.argmax(dim=1)] * values + table[ids]

    def expected(scores: Tensor, table: Tensor) -> Tensor:
        best = torch.max(scores, -1, True)
        values, ids = best[0].squeeze(-1), best[1].squeeze(-1)
        return table[scores.argmax(1, True).squeeze(-1)] * values + table[ids]

    inputs = torch.randn(5, 4), torch.randn(4)
    assert_same_graph(after(before, *inputs), expected)
    _, report = run_passes(expected, ["canonicalize"], *inputs)
    assert report.passes[0].rewrites == 0


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.argmax(),
        lambda x: x.max(0)[1],
        lambda x: x.long().argmax(-1),
        lambda x: x.max(-1)[0],
        lambda x: x.amax(-1),
    ],
    ids=["of_all", "of_a_column", "of_integers", "values_alone", "amax"],
)
def test_a_maximum_that_chooses_no_expert_stays(function):
    x = torch.randn(5, 4)
    module, report = run_passes(lambda x: function(x) + 1, ["canonicalize"], x)
    assert report.passes[0].rewrites == 0 and "squeeze" not in str(module.graph)


def casts(module) -> int:
    return sum(str(node.target).startswith(("aten.to.", "aten._to_copy")) for node in module.graph.nodes)


def test_equal_casts_of_a_tensor_are_one():
    def before(x: Tensor) -> Tensor:
        return sum(torch.relu(x.to(torch.bfloat16)[i]) for i in range(3))

    assert casts(after(before, torch.randn(3, 4))) == 1


def test_casts_that_are_not_the_same_stay():
    def written_between(x: Tensor) -> Tensor:
        y = x * 2
        first = torch.relu(y.to(torch.bfloat16))
        y[0] = 1
        return first + torch.relu(y.to(torch.bfloat16))

    def written_itself(x: Tensor) -> Tensor:
        one, other = x.to(torch.bfloat16), x.to(torch.bfloat16)
        one[0] = 1
        return one + other

    def of_another_grad_mode(x: Tensor) -> Tensor:
        with torch.no_grad():
            one = torch.relu(x.to(torch.bfloat16))
        return one + torch.relu(x.to(torch.bfloat16))

    def to_another_dtype(x: Tensor) -> Tensor:
        return torch.relu(x.to(torch.bfloat16)).float() + torch.relu(x.to(torch.float16)).float()

    def returned(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.to(torch.bfloat16), x.to(torch.bfloat16)

    for before in (written_between, written_itself, of_another_grad_mode, to_another_dtype, returned):
        x = torch.randn(3, 4)
        graph = capture_graph(before, x)
        assert casts(graph) == casts(run_passes(graph, ["canonicalize"])[0]) > 1, before.__name__


def test_the_slices_that_an_unbind_was_written_out_as_are_selects():
    def before(x: Tensor) -> Tensor:
        return torch.relu(x[0:1].squeeze(0)) + torch.sin(x[1:2].squeeze(0)) + torch.cos(x[2:3].squeeze(0))

    def expected(x: Tensor) -> Tensor:
        return torch.relu(x[0]) + torch.sin(x[1]) + torch.cos(x[2])

    assert_same_graph(after(before, torch.randn(3, 4)), expected)


def test_slices_that_are_no_unbind_stay():
    def before(x: Tensor) -> Tensor:
        column = torch.relu(x[:, 1:2].squeeze(1))  # one alone
        kept = x[0:1].squeeze(1) + x[1:2].squeeze(1)  # another dimension than that of the slices
        return column.sum() + kept.sum()

    graph = capture_graph(before, torch.randn(2, 4))
    kept = run_passes(graph, ["canonicalize"])[0]
    assert canonical_text(kept) == canonical_text(graph)
