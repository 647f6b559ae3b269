"""Runs device kernels in triton's interpreter, on the CPU; prints how far they are from their references in float64.

    python -m tests.runtime_kernels.interpreted LAYOUT DTYPE TILE EXPERTS        -> JSON: the error by "kernel.result"

A process of its own: whether triton interprets is decided when the kernels are imported. bfloat16 is no choice, whose
products the interpreter makes of the numbers' bits.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from moe_compiler.runtime_kernels.launching import recording
from moe_compiler.runtime_kernels.registry import kernel
from moe_compiler.runtime_kernels.tiles import Tile, parse_tile
from moe_compiler.runtime_kernels.weights import are_in_turns, in_turns

TOKENS, K, HIDDEN, INNER = 9, 2, 64, 48


def _of_truth_values(method: Any, place: int) -> Any:
    """A masked load or store whose mask, `&` of a tensor and a scalar, the interpreter keeps as integers."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        args[place].data = args[place].data.astype(np.bool_)
        return method(self, *args, **kwargs)

    return call


def _operands(layout: str, dtype: torch.dtype, experts: int) -> dict[str, Any]:
    """The operands of every kernel of a block, in the layouts of conftest; ids go out of range on both sides."""
    torch.manual_seed(0)
    transposed = layout.endswith("transposed")

    def matrices(out: int, in_: int) -> Tensor:
        made = (torch.randn(experts, out, in_) / in_**0.5).to(dtype)
        return made.mT.contiguous().mT if transposed else made

    gate, bias = matrices(2 * INNER, HIDDEN), torch.randn(experts, 2 * INNER).to(dtype)
    if layout.startswith("turns"):
        gate, bias = in_turns(gate, 1), in_turns(bias, 1)
    ids = torch.randint(-1, experts + 1, (TOKENS, K))
    perm, starts = kernel("order").reference(ids=ids, num_experts=experts)
    return {
        "x": torch.randn(TOKENS, HIDDEN).to(dtype),
        "grad_y": torch.randn(TOKENS, HIDDEN).to(dtype),
        "weights": torch.rand(TOKENS, K).to(dtype),
        "ids": ids,
        "perm": perm,
        "starts": starts,
        "gate": [gate],
        "up": [],
        "down": [matrices(HIDDEN, INNER)],
        "gate_bias": [bias],
        "up_bias": [],
        "down_bias": [torch.randn(experts, HIDDEN).to(dtype)],
    }


def _map(value: Any, change: Any) -> Any:
    if isinstance(value, list):
        return [_map(one, change) for one in value]
    return change(value) if isinstance(value, Tensor) and value.is_floating_point() else value


def _run(name: str, tensors: dict[str, Any], attrs: dict[str, Any], tile: Tile | None) -> dict[str, float]:
    """Launch a kernel into poisoned results; the error of each, and its reference's results among the tensors."""
    entry, dtype = kernel(name), tensors["x"].dtype
    ins = {key: tensors[key] for key in entry.traits.reads}
    wide = {key: torch.float64 if key == "dtype" else value for key, value in attrs.items()}
    found = entry.reference(**{key: _map(value, Tensor.double) for key, value in ins.items()}, **wide)
    wants = dict(zip(entry.traits.writes, found if isinstance(found, tuple) else (found,), strict=True))
    narrow = {key: torch.float32 if key == "grad_weights" else dtype for key in wants}
    outs = {
        key: _map(value, lambda t, key=key: torch.full_like(t, float("nan"), dtype=narrow[key]))
        for key, value in wants.items()
    }
    options = {"tile": tile} if tile is not None and entry.traits.tiled and not name.endswith("few") else {}
    with recording() as starts:
        entry.launch(outs, ins, attrs, pdl=False, **options)
    for start in starts:
        if start.kernel.__name__ == "sum_parts_kernel":  # its loop's counter is no tensor to the interpreter
            start.operands[1].view(-1).copy_(start.operands[0].sum(0))
        else:
            start.kernel[(start.programs,)](*start.operands, *start.numbers, **start.constants, PDL=False)
    tensors |= {key: _map(value, lambda t: t.to(dtype)) for key, value in wants.items()}
    errors = {}
    known = slice(0, int(tensors["starts"][-1]))  # the rows of no expert may be anything
    for key, want in wants.items():
        pairs = zip(outs[key], want, strict=True) if isinstance(want, list) else [(outs[key], want)]
        for got, right in pairs:
            rows = known if key in ("act", "preact", "grad_preact") and not name.endswith("few") else slice(None)
            error = (got[rows].double() - right[rows]).norm() / right[rows].norm()
            errors[f"{name}.{key}"] = error.item()
            if got.stride() != right.stride():
                raise AssertionError(f"{name}.{key} has strides {got.stride()}, its reference {right.stride()}")
    return errors


def main(layout: str, dtype_name: str, tile_text: str, experts: str) -> dict[str, float]:
    dtype, tile = getattr(torch, dtype_name), parse_tile(tile_text) if tile_text != "own" else None
    for name, place in (("create_masked_load", 1), ("create_masked_store", 2)):
        setattr(InterpreterBuilder, name, _of_truth_values(getattr(InterpreterBuilder, name), place))
    tensors = _operands(layout, dtype, int(experts))
    form = {"activation": "silu(alpha=1.702,limit=0.7,shift=1.0)", "gated": True}
    weights = tensors["weights"]
    errors: dict[str, float] = {}
    for name, scores, attrs in (
        ("gate_up_few", None, form),
        ("down_few", weights, {"dtype": dtype}),
        ("gate_up", None, {**form, "k": K, "save": True}),
        ("down", None, {}),
        ("grad_act", weights, {**form, "k": K, "turns": are_in_turns(tensors["gate"])}),
        ("grad_gate_up", None, {"k": K, "gated": True}),
        ("grad_gate_up_bias", None, {}),
        ("grad_pairs", None, {"gated": True}),
    ):
        given = tensors | {"weights": scores}
        errors |= _run(name, given, attrs, tile)
        tensors = given
    return errors


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
