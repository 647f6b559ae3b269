"""Launches of every device kernel on small tensors with every optional operand, recorded instead of made."""

from __future__ import annotations

from typing import Any

import torch

from moe_compiler.runtime_kernels.launching import Start, recording
from moe_compiler.runtime_kernels.registry import kernel, names
from moe_compiler.runtime_kernels.tiles import Tile

TOKENS, K, EXPERTS, HIDDEN, INNER = 64, 2, 4, 128, 64
PAIRS = TOKENS * K
ROUTE = {"score": "sigmoid", "order": "before", "renormalize": True, "clamp": False, "eps": 0.0, "scale": 1.0}
ROUTE |= {"groups": 2, "kept_groups": 1, "group_top": 2, "fill": "-inf"}
DEVICE_KERNELS = tuple(name for name in names() if kernel(name).traits.min_arch is not None)
# Large tiles take other paths of the compiler: weights through tensor descriptors, the matrix on the wide side.
TILES = {
    "default": None,
    "tma": Tile(128, 64, 64, 8, 3, 8, False, True),
    "halves": Tile(128, 64, 64, 8, 3, 8, False, True, True, 128),
    "swapped": Tile(16, 64, 64, 4, 3, 1, True, True),
}
TILED = ("gate_up", "down", "grad_act", "grad_pairs")


def record(
    name: str, pdl: bool, dtype: torch.dtype = torch.bfloat16, listed: bool = False, **options: Any
) -> list[Start]:
    """The starts of one launch of kernel `name` on small tensors, with every optional operand present."""
    return record_on(operands(dtype, listed), name, pdl, dtype, **options)


def operands(dtype: torch.dtype = torch.bfloat16, listed: bool = False) -> dict[str, Any]:
    """A tensor, or a list of them, for every name that a kernel reads or writes."""
    ints, value = torch.int32, {"dtype": dtype}

    def weights(out: int, inner: int) -> list[torch.Tensor]:
        one = torch.zeros(EXPERTS, out, inner, **value)
        return [t.clone() for t in one] if listed else [one]

    def biases(out: int) -> list[torch.Tensor]:
        one = torch.zeros(EXPERTS, out, **value)
        return [t.clone() for t in one] if listed else [one]

    gate = weights(2 * INNER, HIDDEN)
    tensors: dict[str, Any] = {
        "x": torch.zeros(TOKENS, HIDDEN, **value),
        "grad_y": torch.zeros(TOKENS, HIDDEN, **value),
        "y": torch.zeros(TOKENS, HIDDEN, **value),
        "router": torch.zeros(EXPERTS, HIDDEN, **value).t(),
        "router_bias": torch.zeros(EXPERTS, **value),
        "logits": torch.zeros(TOKENS, EXPERTS),
        "grad_logits": torch.zeros(TOKENS, EXPERTS),
        "bias": torch.zeros(EXPERTS),
        "expert_scale": torch.zeros(EXPERTS),
        "grad_expert_scale": torch.zeros(EXPERTS),
        "weights": torch.zeros(TOKENS, K, **value),
        "grad_weights": torch.zeros(TOKENS, K),
        "ids": torch.zeros(TOKENS, K, dtype=torch.int64),
        "counts": torch.zeros(1, EXPERTS, dtype=ints),
        "perm": torch.zeros(PAIRS, dtype=ints),
        "starts": torch.zeros(EXPERTS + 1, dtype=ints),
        "act": torch.zeros(PAIRS, INNER, **value),
        "preact": torch.zeros(PAIRS, 2 * INNER, **value),
        "grad_preact": torch.zeros(PAIRS, 2 * INNER, **value),
        "pairs": torch.zeros(PAIRS, HIDDEN, **value),
        "gate": gate,
        "up": [],
        "down": weights(HIDDEN, INNER),
        "grad_gate": weights(2 * INNER, HIDDEN),
        "grad_up": [],
        "grad_down": weights(HIDDEN, INNER),
        "gate_bias": biases(2 * INNER),
        "up_bias": [],
        "down_bias": biases(HIDDEN),
        "grad_gate_bias": biases(2 * INNER),
        "grad_up_bias": [],
        "grad_down_bias": biases(HIDDEN),
    }
    return tensors


def attributes(name: str, dtype: torch.dtype) -> dict[str, Any]:
    """The attributes of a launch of kernel `name` on `operands`."""
    return {
        **({"k": K, **ROUTE, "score_dtype": torch.float32} if name.startswith("route") else {}),
        **({"num_experts": EXPERTS} if name.startswith("order") else {}),
        "k": K,
        "activation": "silu(alpha=1.702,limit=7.0,shift=1.0)",
        "gated": True,
        "save": True,
        "dtype": dtype,
    }


def record_on(tensors: dict[str, Any], name: str, pdl: bool, dtype: torch.dtype, **options: Any) -> list[Start]:
    """The starts of one launch of kernel `name` on these tensors."""
    traits = kernel(name).traits
    with recording() as starts:
        kernel(name).launch(
            {key: tensors[key] for key in traits.writes},
            {key: tensors[key] for key in traits.reads},
            attributes(name, dtype),
            pdl=pdl,
            **options,
        )
    assert starts
    return starts
