"""The plan: which kernels for which number of tokens, and when a rule must not fire."""

from __future__ import annotations

from moe_compiler.plan import FEW_SHARE, ONE_PROGRAM_PAIRS, Step, variants
from moe_compiler.runtime_kernels.chain.program import Buffer, Program

K, E = 4, 16
STEPS = (
    Step("order", {"ids": "ids"}, {"perm": "perm", "starts": "starts"}, {"num_experts": E}),
    Step(
        "gate_up",
        {"x": "x", "weights": None, "perm": "perm", "starts": "starts", "gate": "gate", "up": "up"},
        {"act": "act"},
        {"k": K, "activation": "silu", "gated": True, "save": False},
    ),
    Step("down", {"act": "act", "perm": "perm", "starts": "starts", "down": "down"}, {"pairs": "pairs"}),
    Step("combine", {"pairs": "pairs", "weights": "weights"}, {"y": "y"}, {"k": K, "dtype": "bfloat16"}),
)
SHAPES = {
    "perm": Buffer((f"T*{K}",), "int32"),
    "starts": Buffer((str(E + 1),), "int32"),
    "act": Buffer((f"T*{K}", "32"), "bfloat16"),
    "pairs": Buffer((f"T*{K}", "64"), "bfloat16"),
    "y": Buffer(("T", "64"), "bfloat16"),
}
INPUTS = (("x", None), ("ids", None), ("weights", None), ("gate", 1), ("up", 0), ("down", 1))


def plan(outputs=("y",), device="cuda", steps=STEPS, k=K):
    found = variants(steps, outputs=frozenset(outputs), shapes=SHAPES, device=device, k=k, experts=E)
    Program("test", INPUTS, {"T": ("x", 0)}, tuple(outputs), found).to_text()  # a faulty program raises
    return [(v.name, v.max_tokens, [launch.kernel for launch in v.launches]) for v in found]


def test_three_variants_by_tokens():
    assert plan() == [
        ("few", E // (FEW_SHARE * K), ["gate_up_few", "down_few"]),
        ("sorted", ONE_PROGRAM_PAIRS // K, ["order", "gate_up", "down", "combine"]),
        ("blocked", None, ["order_count", "order_scatter", "gate_up", "down", "combine"]),
    ]


def test_a_value_that_is_read_outside_is_computed_in_every_variant():
    assert [name for name, _, _ in plan(outputs=("y", "perm"))] == ["sorted", "blocked"]
    assert [name for name, _, _ in plan(outputs=("y", "act"))] == ["sorted", "blocked"]


def test_one_token_is_always_few():
    assert plan(k=E)[0][:2] == ("few", 1)


def test_on_a_cpu_one_loop_unless_its_inside_is_read():
    assert plan(device="cpu") == [("loop", None, ["order", "experts_loop"])]
    assert plan(device="cpu", outputs=("y", "pairs")) == [("stages", None, ["order", "gate_up", "down", "combine"])]


def test_stages_that_do_not_feed_each_other_are_not_fused():
    other = (*STEPS[:2], Step("down", {**STEPS[2].ins, "act": "foreign"}, STEPS[2].outs), STEPS[3])
    found = variants(other, outputs=frozenset({"y", "act"}), shapes=SHAPES, device="cuda", k=K, experts=E)
    assert [v.name for v in found] == ["sorted", "blocked"]
