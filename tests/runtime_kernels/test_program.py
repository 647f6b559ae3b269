"""Chain programs as text, the faults that a check finds, and shape expressions."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from moe_compiler.runtime_kernels.chain.program import Buffer, Launch, Program, ProgramError, Variant
from moe_compiler.runtime_kernels.chain.shapes import ShapeExpressionError, compile_shape


def down_then_combine(max_tokens: int | None = None, name: str = "any", **buffers: Buffer) -> Variant:
    return Variant(
        name,
        max_tokens,
        {"pairs": Buffer(("2*T", "12"), "float32"), "y": Buffer(("T", "12"), "float32"), **buffers},
        (
            Launch("down", {"act": "act", "perm": "perm", "starts": "starts", "down": "down"}, {"pairs": "pairs"}),
            Launch("combine", {"pairs": "pairs", "weights": "w"}, {"y": "y"}, {"k": 2, "dtype": "float32"}, True),
        ),
    )


def program(*variants: Variant, **changes) -> Program:
    inputs = (("act", None), ("perm", None), ("starts", None), ("w", None), ("down", 5))
    base = Program("block", inputs, {"T": ("w", 0)}, ("y",), variants or (down_then_combine(),))
    return dataclasses.replace(base, **changes)


def with_launch(index: int, **changes) -> Program:
    variant = down_then_combine()
    launches = list(variant.launches)
    launches[index] = dataclasses.replace(launches[index], **changes)
    return program(dataclasses.replace(variant, launches=tuple(launches)))


def test_text_and_back():
    one = program(down_then_combine(4, "few"), down_then_combine())
    text = one.to_text()
    again = Program.from_text(text)
    assert again == one
    assert again.to_text() == text
    assert Program.from_text(text) is again


def test_the_text_is_canonical():
    variant = down_then_combine()
    turned = dataclasses.replace(variant, buffers=dict(reversed(variant.buffers.items())))
    text = program().to_text()
    assert program(turned).to_text() == text
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))


def test_attributes_that_are_lists_come_back_as_tuples():
    launch = Launch(
        "experts_loop_backward",
        {p: p for p in ("grad_y", "x", "weights", "gate", "up", "down", "preact", "perm", "starts")},
        {"grad_x": "grad_x"},
        {"activation": "silu", "gated": True, "weight_at": "output", "needs": (True,) + (False,) * 7},
    )
    inputs = tuple((p, 1 if p in ("gate", "up", "down") else None) for p in launch.ins.values() if p)
    one = Program("backward", inputs, {}, ("grad_x",), (Variant("any", None, {"grad_x": Buffer(like="x")}, (launch,)),))
    assert Program.from_text(one.to_text()) == one


FAULTS = [
    (lambda: with_launch(0, kernel="up"), r"variant 'any', launch 0 \(up\): no kernel is called 'up'; known kernels"),
    (lambda: with_launch(0, ins={"act": "act"}), "operand 'perm' is missing; the kernel has act, perm, starts, down"),
    (lambda: with_launch(1, ins={"pairs": "rows", "weights": "w"}), "operand 'pairs' is 'rows', no input or buffer"),
    (lambda: with_launch(1, ins={"pairs": "y", "weights": "w"}), "operand 'pairs' reads buffer 'y' before"),
    (lambda: with_launch(1, ins={"pairs": None}), "operand 'pairs' may not be absent"),
    (lambda: with_launch(1, ins={"pairs": "pairs", "scale": "w"}), "operand 'scale' is not known; the kernel has"),
    (lambda: with_launch(1, ins={"pairs": "down"}), "'pairs' is one tensor, but 'down' is a list of tensors"),
    (lambda: with_launch(1, outs={"y": "z"}), "result 'y' writes 'z', which is no buffer; buffers: pairs, y"),
    (lambda: with_launch(1, outs={"y": "act"}), "result 'y' writes input 'act'; a chain never writes its inputs"),
    (lambda: with_launch(1, outs={"y": "pairs"}), "buffer 'pairs' is written a second time"),
    (lambda: with_launch(1, outs={}), "result 'y' is missing; the kernel has y"),
    (
        lambda: with_launch(1, attrs={"dtype": "float33"}),
        "attribute 'dtype': 'float33' is not the name of a torch dtype",
    ),
    (lambda: program(outputs=("z",)), "variant 'any': output 'z' is missing; its buffers: pairs, y"),
    (lambda: program(outputs=("act",)), "output 'act' is an input; an operator may not return its argument"),
    (lambda: program(outputs=("y", "y")), "an output is named twice"),
    (lambda: program(down_then_combine(z=Buffer(("T",), "float32")), outputs=("z",)), "output 'z' is never written"),
    (lambda: program(down_then_combine(act=Buffer(("T",), "float32"))), "buffer 'act' has the name of an input"),
    (lambda: program(down_then_combine(y=Buffer(like="z"))), "buffer 'y' is like 'z', which is no input"),
    (lambda: program(down_then_combine(y=Buffer(like="w", dtype="float32"))), "both `like` and a shape or dtype"),
    (lambda: program(down_then_combine(y=Buffer(("T",)))), "buffer 'y' needs a shape and a dtype, or `like`"),
    (lambda: program(down_then_combine(y=Buffer(("T", "H"), "float32"))), "unknown symbol 'H'; symbols: T"),
    (lambda: program(symbols={"T": ("v", 0)}), "symbol 'T' refers to 'v', which is no input"),
    (
        lambda: program(symbols={"T": ("down", 0)}),
        "symbol 'T' refers to the list 'down'; use an input that is a tensor",
    ),
    (lambda: program(variants=()), "it has no variant"),
    (lambda: program(down_then_combine(8)), "the last variant, 'any', must accept any T"),
    (lambda: program(down_then_combine(8), down_then_combine(4), down_then_combine()), "max_tokens .* must grow"),
    (
        lambda: program(
            down_then_combine(4, pairs=Buffer(("6",), "float32"), y=Buffer(("6",), "float32")),
            down_then_combine(None, pairs=Buffer(("6",), "float32"), y=Buffer(("6",), "float32")),
            symbols={},
        ),
        "several variants and no symbol 'T'",
    ),
    (
        lambda: program(down_then_combine(4, "few", y=Buffer(("T", "13"), "float32")), down_then_combine()),
        "output 'y' is .* in variant 'few' and .* in variant 'any'; they must agree",
    ),
    (lambda: program(inputs=(("w", None), ("w", None))), "two inputs have the same name"),
]


@pytest.mark.parametrize(("build", "message"), FAULTS)
def test_faults(build, message):
    faulty = build()
    with pytest.raises(ProgramError, match=message):
        faulty.to_text()
    assert issubclass(ProgramError, ValueError)


def test_faults_are_found_when_a_text_is_parsed():
    data = json.loads(program().to_text())
    data["variants"][0]["launches"][0]["kernel"] = "up"
    with pytest.raises(ProgramError, match="no kernel is called 'up'"):
        Program.from_text(json.dumps(data))
    del data["outputs"]
    with pytest.raises(ProgramError, match="lacks a field or has one of a wrong form: KeyError\\('outputs'\\)"):
        Program.from_text(json.dumps(data))
    with pytest.raises(ProgramError, match="is not JSON"):
        Program.from_text("{")


def test_equal_shapes_may_be_spelt_differently():
    few = down_then_combine(4, "few", y=Buffer(("(T*2)//2", "3*4"), "float32"))
    assert program(few, down_then_combine()).to_text()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("T", 37),
        ("8*T", 296),
        ("T*8 + 3", 299),
        ("T - 1", 36),
        ("-T + 40", 3),
        ("(8*T + 1023)//1024", 1),
        ("CeilDiv(8*T, 100)", 3),
        ("FloorDiv(T, 2)", 18),
        ("floor(T/2)", 18),
        ("floor(T/128 + 127/128)", 1),
        ("ceiling(T/128)", 1),
        ("ceiling(3*T/2)", 56),
        ("Max(T, 64)", 64),
        ("Min(1, T, S)", 1),
        ("Mod(T, 8)", 5),
        ("T % 8", 5),
        ("T**2", 1369),
        ("T*S//4", 37),
        ("12", 12),
        ("0*T", 0),
    ],
)
def test_shape_expressions(text, value):
    assert compile_shape((text,), ("S", "T"))([4, 37]) == (value,)


def test_a_shape_of_no_dimension():
    assert compile_shape((), ("T",))([3]) == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("T +", "'T \\+' is not an expression"),
        ("T.shape", "Attribute is not allowed"),
        ("__import__('os')", "only these functions are known: floor, ceiling"),
        ("Max(T, default=1)", "keyword is not allowed"),
        ("T*0.5", "0.5 is not an integer"),
        ("T/2", "is not a whole number for all sizes; use //"),
        ("T//0", "divides by zero"),
        ("floor(T, 2, 3)", "takes"),
        ("K", "unknown symbol 'K'; symbols: T"),
        ("[T]", "List is not allowed"),
    ],
)
def test_faults_of_shape_expressions(text, message):
    with pytest.raises(ShapeExpressionError, match=message):
        compile_shape((text,), ("T",))


def test_dtypes_by_name():
    from moe_compiler.runtime_kernels.chain.program import dtype_named

    assert dtype_named("bfloat16") is torch.bfloat16
    for name in ("nn", "bf17", 3):
        with pytest.raises(ProgramError, match="is not the name of a torch dtype"):
            dtype_named(name)
