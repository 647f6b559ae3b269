"""The stage operators, each against its formula pair by pair, and their declarations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import moe_compiler.runtime_kernels.register  # noqa: F401
from moe_compiler.runtime_kernels.order.reference import ORDER_BLOCK
from moe_compiler.runtime_kernels.registry import kernel, names

ops = torch.ops.moepdl


def stage_calls(block):
    """(operator, arguments) of every stage of the block, forward and backward."""
    b, k = block.detached(), block.ids.shape[1]
    inside = b.weights if b.weight_at == "input" else None
    outside = b.weights if b.weight_at == "output" else None
    attrs = (k, b.activation, b.gated)
    turns = b.gate[0].dim() == 4
    perm, starts = ops.order(b.ids, 5)
    act, preact = ops.gate_up(b.x, inside, perm, starts, b.gate, b.up, b.gate_bias, b.up_bias, *attrs, True)
    pairs = ops.down(act, perm, starts, b.down, b.down_bias)
    grad_y = torch.randn_like(b.x)
    grad_preact, acted, _ = ops.grad_act(grad_y, outside, preact, perm, starts, b.down, b.down_bias, *attrs, turns)
    return [
        (ops.order, (b.ids, 5)),
        (ops.gate_up, (b.x, inside, perm, starts, b.gate, b.up, b.gate_bias, b.up_bias, *attrs, True)),
        (ops.gate_up, (b.x, inside, perm, starts, b.gate, b.up, b.gate_bias, b.up_bias, *attrs, False)),
        (ops.down, (act, perm, starts, b.down, b.down_bias)),
        (ops.combine, (pairs, outside, k, b.dtype)),
        (ops.grad_act, (grad_y, outside, preact, perm, starts, b.down, b.down_bias, *attrs, turns)),
        (ops.grad_down, (grad_y, acted, perm, starts, b.down, k)),
        (ops.grad_gate_up, (b.x, inside, grad_preact, perm, starts, b.gate, b.up, k, b.gated)),
        (ops.grad_down_bias, (grad_y, outside, perm, starts, b.down_bias or [b.down[0].new_ones(5, 12)], k)),
        (ops.grad_gate_up_bias, (grad_preact, starts, b.gate_bias, b.up_bias)),
        (ops.grad_pairs, (grad_preact, perm, starts, b.gate, b.up, b.gated)),
        (ops.grad_input_weights, (b.x, pairs, k)),
    ]


@pytest.mark.parametrize("tokens", [6, 0])
@pytest.mark.parametrize(
    ("layout", "weight_at"), [("packed_transposed", "output"), ("list", "input"), ("turns_transposed", "output")]
)
def test_opcheck(make_block, layout, weight_at, tokens):
    for op, arguments in stage_calls(make_block(layout=layout, weight_at=weight_at, tokens=tokens, routing="outside")):
        torch.library.opcheck(op.default, arguments)


@pytest.mark.parametrize(
    ("layout", "weight_at"), [("packed", "output"), ("separate", "input"), ("list", "output"), ("turns", "output")]
)
def test_fakes_add_no_guard_on_the_tokens(make_block, layout, weight_at):
    """T is a symbol in every input that has it; no fake may ask for its value."""
    tokens, pairs = 37, 74
    for op, arguments in stage_calls(make_block(layout=layout, weight_at=weight_at)):
        env = ShapeEnv()
        mode = FakeTensorMode(shape_env=env)

        def fake(value, mode=mode):
            if isinstance(value, list):
                return [mode.from_tensor(t) for t in value]
            if not isinstance(value, torch.Tensor):
                return value
            sizes = [DimDynamic.DYNAMIC if s in (tokens, pairs) else DimDynamic.STATIC for s in value.shape]
            return mode.from_tensor(value, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))

        with mode:
            results = op(*[fake(a) for a in arguments])
        assert env.guards == [], str(op)
        real = op(*arguments)
        for one, other in zip(_flat(results), _flat(real), strict=True):
            assert one.dtype == other.dtype
            assert [int(s) for s in one.shape] == list(other.shape)


def _flat(results):
    return [results] if isinstance(results, torch.Tensor) else list(results)


@given(
    ids=st.lists(st.integers(-1, 6), min_size=0, max_size=60).map(lambda v: v[: len(v) // 2 * 2]),
    wide=st.booleans(),
)
def test_order_is_a_stable_sort(ids, wide):
    table = torch.tensor(ids, dtype=torch.int64 if wide else torch.int32).view(-1, 2)
    perm, starts = ops.order(table, 5)
    experts = [e if 0 <= e < 5 else 5 for e in ids]
    assert perm.tolist() == sorted(range(len(ids)), key=lambda p: (experts[p], p))
    assert starts.tolist() == [sum(e < bound for e in experts) for bound in range(6)]
    assert (perm.dtype, starts.dtype) == (torch.int32, torch.int32)


@pytest.mark.parametrize("tokens", [0, 1, 37, ORDER_BLOCK, 3 * ORDER_BLOCK // 2 + 5])
def test_order_in_two_kernels(make_block, tokens):
    ids = make_block(tokens=tokens, routing="outside").ids
    counts = kernel("order_count").reference(ids, 5)
    assert counts.shape == (-(-tokens * 2 // ORDER_BLOCK), 5)
    for one, other in zip(kernel("order_scatter").reference(ids, counts, 5), ops.order(ids, 5), strict=True):
        assert torch.equal(one, other)
        assert one.dtype == torch.int32


@pytest.mark.parametrize("weight_at", ["output", "input"])
@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_the_kernels_for_few_tokens(make_block, tokens, weight_at):
    block = make_block(tokens=tokens, weight_at=weight_at, routing="outside", layout="separate").detached()
    inside = block.weights if weight_at == "input" else None
    outside = block.weights if weight_at == "output" else None
    act = kernel("gate_up_few").reference(block.x, inside, block.ids, block.gate, block.up, [], [], "silu", True)
    y = kernel("down_few").reference(act, block.ids, outside, block.down, [], torch.float32)
    torch.testing.assert_close(y, ops.experts(*block.arguments))


def test_rows_of_ids_out_of_range_are_zero(make_block):
    block = make_block(routing="outside").detached()
    outside = ~((block.ids >= 0) & (block.ids < 5)).flatten()
    assert outside.any()
    perm, starts = ops.order(block.ids, 5)
    act, preact = ops.gate_up(block.x, None, perm, starts, block.gate, [], [], [], 2, "silu", True, True)
    assert not ops.down(act, perm, starts, block.down, [])[outside].any()
    grad_preact, _, grad_weights = ops.grad_act(
        torch.ones_like(block.x), block.weights, preact, perm, starts, block.down, [], 2, "silu", True
    )
    assert not grad_weights.flatten()[outside].any()
    assert not ops.grad_pairs(grad_preact, perm, starts, block.gate, [], True)[outside].any()


def test_gate_up_keeps_gate_before_up_and_rows_in_order(make_block):
    block = make_block(layout="separate", dtype=torch.float64).detached()
    perm, starts = ops.order(block.ids, 5)
    act, preact = ops.gate_up(block.x, None, perm, starts, block.gate, block.up, [], [], 2, "silu", True, True)
    for row, pair in enumerate(perm.tolist()):
        x, e = block.x[pair // 2], block.ids.flatten()[pair]
        gate, up = block.gate[0][e] @ x, block.up[0][e] @ x
        torch.testing.assert_close(preact[row], torch.cat([gate, up]))
        torch.testing.assert_close(act[row], torch.nn.functional.silu(gate) * up)
    again, nothing = ops.gate_up(block.x, None, perm, starts, block.gate, block.up, [], [], 2, "silu", True, False)
    assert torch.equal(again, act)
    assert nothing.shape == (0, 14)


def test_grad_act_without_weights(make_block):
    block = make_block(dtype=torch.float64).detached()
    perm, starts = ops.order(block.ids, 5)
    _, preact = ops.gate_up(block.x, None, perm, starts, block.gate, [], [], [], 2, "silu", True, True)
    grad_y = torch.randn_like(block.x)
    plain = ops.grad_act(grad_y, None, preact, perm, starts, block.down, [], 2, "silu", True)
    ones = ops.grad_act(grad_y, torch.ones_like(block.weights), preact, perm, starts, block.down, [], 2, "silu", True)
    for one, other in zip(plain[:2], ones[:2], strict=True):
        torch.testing.assert_close(one, other)
    assert plain[2].shape == (0, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_combine(dtype):
    pairs, weights = torch.randn(37 * 3, 5).to(dtype), torch.rand(37, 3)
    terms = pairs.view(37, 3, 5).float()
    expected = terms[:, 0] * weights[:, :1]
    for j in (1, 2):
        expected = expected + terms[:, j] * weights[:, j : j + 1]
    torch.testing.assert_close(ops.combine(pairs, weights, 3, torch.float32), expected)
    torch.testing.assert_close(ops.combine(pairs, None, 3, torch.float32), terms.sum(1))
    assert ops.combine(pairs, weights, 3, torch.bfloat16).dtype == torch.bfloat16


def test_combine_of_one_pair_a_token_is_a_copy():
    pairs = torch.randn(4, 3)
    y = ops.combine(pairs, None, 1, torch.float32)
    assert torch.equal(y, pairs)
    assert y.data_ptr() != pairs.data_ptr()


def test_grad_input_weights():
    x, pairs = torch.randn(6, 5, dtype=torch.bfloat16), torch.randn(12, 5, dtype=torch.bfloat16)
    result = ops.grad_input_weights(x, pairs, 2)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, torch.einsum("th,tjh->tj", x.float(), pairs.float().view(6, 2, 5)))


def test_every_kernel_has_a_reference_with_the_parameters_of_its_traits():
    import inspect

    for name in names():
        entry = kernel(name)
        parameters = list(inspect.signature(entry.reference).parameters)
        assert set(entry.traits.reads) <= set(parameters), name
        for group in (entry.traits.weights, entry.traits.optional_reads):
            assert set(group) <= set(entry.traits.reads), name
        assert set(entry.traits.optional_writes) <= set(entry.traits.writes), name
        assert set(entry.traits.lists) <= {*entry.traits.reads, *entry.traits.writes}, name


def test_an_unknown_kernel_names_the_known_ones():
    with pytest.raises(ValueError, match="no kernel is called 'gate_down'; known kernels: combine, down"):
        kernel("gate_down")
