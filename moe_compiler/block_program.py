"""The chain of a block that is given by its sizes alone, without a model or a graph: for calibration and benchmarks.

The plan is the compiler's own (`plan.variants`), so what is measured here is what a model of these sizes would run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_compiler.memory import in_chunks
from moe_compiler.plan import Step, variants
from moe_compiler.runtime_kernels.chain.program import Attribute, Buffer, Program
from moe_compiler.runtime_kernels.registry import kernel

__all__ = ["BlockSizes", "backward_program", "forward_program", "inputs_of", "saving_text", "weights_of"]

_ROUTE: dict[str, Attribute] = {
    "score": "softmax",
    "order": "before",
    "groups": 1,
    "kept_groups": 1,
    "group_top": 1,
    "fill": "-inf",
    "renormalize": True,
    "clamp": False,
    "eps": 0.0,
    "scale": 1.0,
    "score_dtype": "float32",
}
_ACT: dict[str, Attribute] = {"activation": "silu", "gated": True}


@dataclass(frozen=True)
class BlockSizes:
    """A block of `experts` experts, `k` a token, gated: gate and up [E, 2I, H] in one tensor, down [E, H, I]."""

    experts: int
    k: int
    hidden: int
    intermediate: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def named(self) -> dict[str, int]:
        """The sizes by the symbols of `cost`."""
        width = torch.empty((), dtype=self.dtype).element_size()
        wide = 2 * self.intermediate
        return {"k": self.k, "E": self.experts, "H": self.hidden, "I": self.intermediate, "N": wide, "w": width}


def forward_program(
    sizes: BlockSizes, *, save: bool = False, router: bool = True, pdl: bool = True, low: bool = False
) -> Program:
    """router_logits, route, order, gate_up, down and combine over inputs (x [T,H], router [H,E], gate, down).

    save: also the pre-activation, the order and the routing weights, as training keeps them. router: False for the
    chain without its first two launches, over inputs (x, ids [T,k] int64, weights [T,k], gate, down). pdl: every launch
    but the first is programmatic. low: as options["memory"] = "low" has it.
    """
    dtype = _name(sizes.dtype)
    expert = {"perm": "perm", "starts": "starts"}
    steps = (
        Step("router_logits", {"x": "x", "router": "router"}, {"logits": "logits"}),
        Step("route", {"logits": "logits"}, {"weights": "w", "ids": "ids"}, {"k": sizes.k, **_ROUTE, "dtype": dtype}),
        Step("order", {"ids": "ids"}, expert, {"num_experts": sizes.experts}),
        Step(
            "gate_up",
            {"x": "x", "weights": None, **expert, "gate": "gate", "up": "up"},
            {"act": "act", **({"preact": "preact"} if save else {})},
            {**_ACT, "k": sizes.k, "save": save},
        ),
        Step("down", {"act": "act", **expert, "down": "down"}, {"pairs": "pairs"}),
        Step("combine", {"pairs": "pairs", "weights": "w"}, {"y": "y"}, {"k": sizes.k, "dtype": dtype}),
    )
    given = ("x", "router") if router else ("x", "ids", "w")
    inputs = (*((name, None) for name in given), ("gate", 1), ("up", 0), ("down", 1))
    outputs = ("y", *(("w",) if router else ()), "preact", "perm", "starts") if save else ("y",)
    program = _program("moe_forward", steps if router else steps[2:], inputs, ("x", 0), outputs, sizes, pdl)
    return in_chunks(program)[0] if low else program


def backward_program(sizes: BlockSizes, *, pdl: bool = True) -> Program:
    """The gradients of x, the routing weights and both weights over inputs (grad_y, x, w, preact, perm, starts, gate,
    down)."""
    dtype = _name(sizes.dtype)
    expert = {"perm": "perm", "starts": "starts"}
    projections = {"gate": "gate", "up": "up"}
    steps = (
        Step(
            "grad_act",
            {"grad_y": "grad_y", "weights": "w", "preact": "preact", **expert, "down": "down"},
            {"grad_preact": "grad_preact", "act": "act", "grad_weights": "grad_w"},
            {**_ACT, "k": sizes.k},
        ),
        Step(
            "grad_down",
            {"grad_y": "grad_y", "act": "act", **expert, "down": "down"},
            {"grad_down": "grad_down"},
            {"k": sizes.k},
        ),
        Step(
            "grad_gate_up",
            {"x": "x", "weights": None, "grad_preact": "grad_preact", **expert, **projections},
            {"grad_gate": "grad_gate", "grad_up": "grad_up"},
            {"k": sizes.k, "gated": True},
        ),
        Step(
            "grad_pairs", {"grad_preact": "grad_preact", **expert, **projections}, {"pairs": "pairs"}, {"gated": True}
        ),
        Step("combine", {"pairs": "pairs", "weights": None}, {"y": "grad_x"}, {"k": sizes.k, "dtype": dtype}),
    )
    names = ("grad_y", "x", "w", "preact", "perm", "starts")
    inputs = (*((name, None) for name in names), ("gate", 1), ("up", 0), ("down", 1))
    outputs = ("grad_x", "grad_w", "grad_gate", "grad_up", "grad_down")
    return _program("moe_backward", steps, inputs, ("grad_y", 0), outputs, sizes, pdl)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _program(
    name: str,
    steps: tuple[Step, ...],
    inputs: tuple[tuple[str, int | None], ...],
    tokens: tuple[str, int],
    outputs: tuple[str, ...],
    sizes: BlockSizes,
    pdl: bool,
) -> Program:
    dtype, pairs = _name(sizes.dtype), f"T*{sizes.k}"
    wide = str(2 * sizes.intermediate)
    shapes = {
        "logits": Buffer(("T", str(sizes.experts)), dtype),
        "w": Buffer(("T", str(sizes.k)), dtype),
        "ids": Buffer(("T", str(sizes.k)), "int64"),
        "perm": Buffer((pairs,), "int32"),
        "starts": Buffer((str(sizes.experts + 1),), "int32"),
        "act": Buffer((pairs, str(sizes.intermediate)), dtype),
        "preact": Buffer((pairs, wide), dtype),
        "pairs": Buffer((pairs, str(sizes.hidden)), dtype),
        "y": Buffer(("T", str(sizes.hidden)), dtype),
        "grad_x": Buffer(("T", str(sizes.hidden)), dtype),
        "grad_w": Buffer(("T", str(sizes.k)), "float32"),
        "grad_preact": Buffer((pairs, wide), dtype),
        "grad_gate": Buffer(like="gate"),
        "grad_up": Buffer(like="up"),
        "grad_down": Buffer(like="down"),
    }
    made = variants(steps, outputs=frozenset(outputs), shapes=shapes, device="cuda", k=sizes.k, experts=sizes.experts)
    marked = tuple(
        replace(
            variant,
            launches=tuple(
                replace(launch, pdl=pdl and index > 0 and kernel(launch.kernel).traits.waits)
                for index, launch in enumerate(variant.launches)
            ),
        )
        for variant in made
    )
    return Program(name=name, inputs=inputs, symbols={"T": tokens}, outputs=outputs, variants=marked)


def saving_text(sizes: BlockSizes) -> str:
    """The forward program that makes what the backward program reads, launched plainly."""
    return forward_program(sizes, save=True, pdl=False).to_text()


def weights_of(sizes: BlockSizes, device: str) -> dict[str, list[Tensor]]:
    """gate [E, 2I, H], up (none), down [E, H, I] and router [E, H]; random on a GPU, uninitialised elsewhere."""

    def made(*shape: int) -> Tensor:
        tensor = torch.empty(shape, dtype=sizes.dtype, device=device)
        return tensor.normal_(std=0.02) if tensor.is_cuda else tensor

    gate = made(sizes.experts, 2 * sizes.intermediate, sizes.hidden)
    down = made(sizes.experts, sizes.hidden, sizes.intermediate)
    return {"gate": [gate], "up": [], "down": [down], "router": [made(sizes.experts, sizes.hidden)]}


def inputs_of(
    sizes: BlockSizes, tokens: int, weights: dict[str, list[Tensor]], device: str, *, backward: bool = False
) -> list[Tensor]:
    """Operands of the forward or the backward program for T tokens, which are unit normal.

    The backward's saved values are uninitialised off a GPU, and the forward's own on one.
    """

    def made(*shape: int, dtype: torch.dtype = sizes.dtype) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        return tensor.normal_() if tensor.is_cuda and dtype.is_floating_point else tensor

    x = made(tokens, sizes.hidden)
    both = [*weights["gate"], *weights["up"], *weights["down"]]
    if not backward:
        return [x, weights["router"][0].t(), *both]
    pairs = tokens * sizes.k
    if x.is_cuda:
        first = inputs_of(sizes, tokens, weights, device)
        _, w, preact, perm, starts = torch.ops.moepdl.chain([x, *first[1:]], saving_text(sizes))
    else:
        w, preact = made(tokens, sizes.k), made(pairs, 2 * sizes.intermediate)
        perm, starts = made(pairs, dtype=torch.int32), made(sizes.experts + 1, dtype=torch.int32)
    return [made(tokens, sizes.hidden), x, w, preact, perm, starts, *both]
