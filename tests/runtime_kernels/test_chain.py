"""The chain operator: programs against the composition, variants, fakes, and the logic of the CUDA launcher."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import moe_compiler.runtime_kernels.register  # noqa: F401
from moe_compiler.runtime_kernels.chain import launcher
from moe_compiler.runtime_kernels.chain.prepared import prepare
from moe_compiler.runtime_kernels.chain.program import Buffer, Launch, Program, ProgramError, Variant
from moe_compiler.runtime_kernels.registry import Kernel

ops = torch.ops.moepdl
ATTRS = {"activation": "silu", "gated": True}


def _sizes(block) -> tuple[int, str, str]:
    """(experts, hidden, inner) of a block with k = 2; the latter two as a program spells them."""
    down = block.down[0]
    return down.shape[0] if down.dim() == 3 else len(block.down), str(down.shape[-2]), str(down.shape[-1])


def forward_program(block) -> Program:
    """order, gate_up, down, combine; up to 4 tokens the two kernels that do not sort."""
    dtype = str(block.dtype).removeprefix("torch.")
    experts, hidden, inner = _sizes(block)
    weights = {"gate": "gate", "up": "up"}
    sorted_launches = (
        Launch("order", {"ids": "ids"}, {"perm": "perm", "starts": "starts"}, {"num_experts": experts}),
        Launch(
            "gate_up",
            {"x": "x", "weights": None, "perm": "perm", "starts": "starts", **weights},
            {"act": "act"},
            {**ATTRS, "k": 2, "save": False},
            True,
        ),
        Launch(
            "down", {"act": "act", "perm": "perm", "starts": "starts", "down": "down"}, {"pairs": "pairs"}, {}, True
        ),
        Launch("combine", {"pairs": "pairs", "weights": "w"}, {"y": "y"}, {"k": 2, "dtype": dtype}, True),
    )
    few_launches = (
        Launch("gate_up_few", {"x": "x", "ids": "ids", **weights}, {"act": "act"}, ATTRS),
        Launch(
            "down_few", {"act": "act", "ids": "ids", "weights": "w", "down": "down"}, {"y": "y"}, {"dtype": dtype}, True
        ),
    )
    y = Buffer(("T", hidden), dtype)
    act = Buffer(("2*T", inner), dtype)
    lots = {
        "perm": Buffer(("2*T",), "int32"),
        "starts": Buffer((str(experts + 1),), "int32"),
        "act": act,
        "pairs": Buffer(("T*2", hidden), dtype),
        "y": y,
    }
    return Program(
        "experts",
        (("x", None), ("ids", None), ("w", None), *_lists(block)),
        {"T": ("x", 0)},
        ("y",),
        (Variant("few", 4, {"act": act, "y": y}, few_launches), Variant("any", None, lots, sorted_launches)),
    )


def _lists(block):
    return ("gate", len(block.gate)), ("up", len(block.up)), ("down", len(block.down))


def backward_program(block, pdl: bool = True) -> Program:
    dtype = str(block.dtype).removeprefix("torch.")
    _, hidden, inner = _sizes(block)
    order = {"perm": "perm", "starts": "starts"}
    projections = {"gate": "gate", "up": "up"}
    launches = (
        Launch(
            "grad_act",
            {"grad_y": "grad_y", "weights": "w", "preact": "preact", **order, "down": "down"},
            {"grad_preact": "grad_preact", "act": "act", "grad_weights": "grad_w"},
            {**ATTRS, "k": 2},
        ),
        Launch(
            "grad_down",
            {"grad_y": "grad_y", "act": "act", **order, "down": "down"},
            {"grad_down": "grad_down"},
            {"k": 2},
            pdl,
        ),
        Launch(
            "grad_gate_up",
            {"x": "x", "weights": None, "grad_preact": "grad_preact", **order, **projections},
            {"grad_gate": "grad_gate", "grad_up": "grad_up"},
            {"k": 2, "gated": True},
            pdl,
        ),
        Launch(
            "grad_pairs",
            {"grad_preact": "grad_preact", **order, **projections},
            {"pairs": "pairs"},
            {"gated": True},
            pdl,
        ),
        Launch("combine", {"pairs": "pairs"}, {"y": "grad_x"}, {"k": 2, "dtype": dtype}, pdl),
    )
    buffers = {
        "grad_preact": Buffer(like="preact"),
        "act": Buffer(("2*T", inner), dtype),
        "grad_w": Buffer(("T", "2"), "float64" if dtype == "float64" else "float32"),
        "pairs": Buffer(("2*T", hidden), dtype),
        "grad_x": Buffer(("T", hidden), dtype),
        "grad_gate": Buffer(like="gate"),
        "grad_up": Buffer(like="up"),
        "grad_down": Buffer(like="down"),
    }
    names = ("grad_y", "x", "w", "preact", "perm", "starts")
    return Program(
        "experts_backward",
        (*((n, None) for n in names), *_lists(block)),
        {"T": ("grad_y", 0)},
        ("grad_x", "grad_w", "grad_gate", "grad_up", "grad_down"),
        (Variant("any", None, buffers, launches),),
    )


def forward_inputs(b):
    return [b.x, b.ids, b.weights, *b.gate, *b.up, *b.down]


def backward_inputs(b):
    _, preact, perm, starts = ops.experts_saving(*b.arguments)
    return [torch.randn_like(b.x), b.x, b.weights, preact, perm, starts, *b.gate, *b.up, *b.down]


@pytest.mark.parametrize("layout", ["packed", "packed_transposed", "separate", "list"])
@pytest.mark.parametrize("tokens", [0, 1, 4, 5, 37])
def test_forward(make_block, assert_close, tokens, layout):
    block = make_block(tokens=tokens, layout=layout, routing="outside").detached()
    (y,) = ops.chain(forward_inputs(block), forward_program(block).to_text())
    assert_close(y, ops.experts(*block.arguments), block.dtype)


@pytest.mark.parametrize("layout", ["packed", "separate", "list"])
@pytest.mark.parametrize("tokens", [0, 37])
def test_backward(make_block, assert_close, tokens, layout):
    block = make_block(tokens=tokens, layout=layout).detached()
    inputs = backward_inputs(block)
    grads = ops.chain(inputs, backward_program(block).to_text())
    expected = ops.experts_backward(
        inputs[0], *block.arguments[:9], inputs[3], inputs[4], inputs[5], *block.arguments[9:12], [True] * 8
    )
    flat = [expected[0], expected[1], *expected[2], *expected[3], *expected[4]]
    for one, other in zip(grads, flat, strict=True):
        assert one.stride() == other.stride()
        assert_close(one, other, block.dtype)


@pytest.mark.parametrize(("layout", "tokens"), [("packed_transposed", 6), ("list", 6), ("separate", 0)])
def test_opcheck(make_block, layout, tokens):
    block = make_block(layout=layout, tokens=tokens).detached()
    torch.library.opcheck(ops.chain.default, (forward_inputs(block), forward_program(block).to_text()))
    torch.library.opcheck(ops.chain.default, (backward_inputs(block), backward_program(block).to_text()))


def test_the_loop_kernels_in_a_chain(make_block, assert_close):
    block = make_block(layout="separate").detached()
    launches = (
        Launch("order", {"ids": "ids"}, {"perm": "perm", "starts": "starts"}, {"num_experts": 5}),
        Launch(
            "experts_loop_saving",
            {n: n for n in ("x", "ids", "weights", "gate", "up", "down", "perm", "starts")},
            {"y": "y", "preact": "preact"},
            {**ATTRS, "weight_at": "output", "dtype": "float32"},
        ),
    )
    buffers = {
        "perm": Buffer(("2*T",), "int32"),
        "starts": Buffer(("6",), "int32"),
        "y": Buffer(("T", "12"), "float32"),
        "preact": Buffer(("2*T", "14"), "float32"),
    }
    program = Program(
        "loop",
        (("x", None), ("ids", None), ("weights", None), *_lists(block)),
        {"T": ("x", 0)},
        ("y", "preact", "perm", "starts"),
        (Variant("any", None, buffers, launches),),
    )
    results = ops.chain(forward_inputs(block), program.to_text())
    for one, other in zip(results, ops.experts_saving(*block.arguments), strict=True):
        assert torch.equal(one, other)


def test_compiled_with_dynamic_tokens(make_block):
    """One graph for every T, on both sides of the threshold between the variants."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    text = forward_program(make_block().detached()).to_text()
    compiled = torch.compile(lambda *t: ops.chain(list(t), text)[0] + 1, backend=backend, dynamic=True, fullgraph=True)
    for tokens in (37, 3, 64, 2):
        block = make_block(tokens=tokens).detached()
        torch.testing.assert_close(compiled(*forward_inputs(block)), ops.experts(*block.arguments) + 1)
    assert len(graphs) == 1


def test_compiled_by_inductor(make_block):
    block = make_block(layout="packed_transposed").detached()
    text = forward_program(block).to_text()
    compiled = torch.compile(lambda *t: ops.chain(list(t), text)[0].relu(), dynamic=True, fullgraph=True)
    torch.testing.assert_close(compiled(*forward_inputs(block)), ops.experts(*block.arguments).relu())


class Recorder:
    """Stands in for device launches: runs the reference, fills the given buffers, notes what happened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[tuple[str, bool]] = []

        def launch(kernel: Kernel):
            def run(outs, ins, attrs, *, pdl):
                self.launches.append((kernel.name, pdl))
                results = kernel.reference(**ins, **attrs)
                named = dict(
                    zip(kernel.traits.writes, results if isinstance(results, tuple) else (results,), strict=True)
                )
                for name, out in outs.items():
                    pairs = (
                        [(out, named[name])] if isinstance(out, torch.Tensor) else zip(out, named[name], strict=True)
                    )
                    for given, value in pairs:
                        assert (given.shape, given.dtype, given.stride()) == (value.shape, value.dtype, value.stride())
                        given.copy_(value)

            return run

        monkeypatch.setattr(Kernel, "launch", property(launch))


@pytest.fixture
def recorder(monkeypatch) -> Recorder:
    return Recorder(monkeypatch)


def test_the_launcher_picks_the_variant_and_keeps_pdl(make_block, assert_close, recorder):
    for tokens, expected in (
        (4, [("gate_up_few", False), ("down_few", True)]),
        (5, [("order", False), ("gate_up", True), ("down", True), ("combine", True)]),
    ):
        block = make_block(tokens=tokens).detached()
        recorder.launches.clear()
        (y,) = launcher.run(forward_inputs(block), forward_program(block).to_text())
        assert recorder.launches == expected
        assert_close(y, ops.experts(*block.arguments), block.dtype)


def test_the_launcher_without_tokens(make_block, recorder):
    block = make_block(tokens=0, layout="separate").detached()
    (y,) = launcher.run(forward_inputs(block), forward_program(block).to_text())
    assert y.shape == (0, 12)
    assert recorder.launches == []
    grads = launcher.run(backward_inputs(block), backward_program(block).to_text())
    assert recorder.launches == [("grad_down", False), ("grad_gate_up", False)]
    assert [g.shape for g in grads[2:]] == [w.shape for w in (*block.gate, *block.up, *block.down)]
    assert not any(g.any() for g in grads)


@pytest.mark.parametrize("layout", ["packed_transposed", "list"])
def test_the_launcher_backward(make_block, recorder, layout):
    block = make_block(layout=layout).detached()
    inputs, text = backward_inputs(block), backward_program(block).to_text()
    for one, other in zip(launcher.run(inputs, text), ops.chain(inputs, text), strict=True):
        assert torch.equal(one, other)


def test_intermediate_buffers_end_with_their_last_reader(make_block):
    variant = prepare(forward_program(make_block()).to_text()).any_variant()
    assert [launch.dead for launch in variant.launches] == [(), (), ("act", "perm", "starts"), ("pairs",)]


def test_outputs_are_fresh(make_block):
    block = make_block().detached()
    inputs = forward_inputs(block)
    (y,) = ops.chain(inputs, forward_program(block).to_text())
    assert y.untyped_storage().data_ptr() not in {t.untyped_storage().data_ptr() for t in inputs}


def test_errors(make_block):
    block = make_block().detached()
    inputs, program = forward_inputs(block), forward_program(block)
    with pytest.raises(ProgramError, match="chain program 'experts' takes 5 tensors, got 4"):
        ops.chain(inputs[:-1], program.to_text())
    with pytest.raises(ProgramError, match="is not JSON"):
        ops.chain(inputs, "experts")
    few, lots = program.variants
    wrong = dataclasses.replace(lots, buffers={**lots.buffers, "act": Buffer(("2*T", "8"), "float32")})
    with pytest.raises(ProgramError, match=r"gate_up gives 'act' as \(74, 7\) torch.float32, but buffer 'act' is"):
        ops.chain(inputs, dataclasses.replace(program, variants=(few, wrong)).to_text())
