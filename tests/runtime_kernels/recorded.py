"""Launches of every device kernel on small tensors with every optional operand, recorded instead of made."""

from __future__ import annotations

from typing import Any

import torch

from moe_compiler.runtime_kernels.launching import Start, recording
from moe_compiler.runtime_kernels.registry import kernel, names
from moe_compiler.runtime_kernels.tiles import Tile
from moe_compiler.runtime_kernels.weights import in_turns

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


def operands(
    dtype: torch.dtype = torch.bfloat16,
    listed: bool = False,
    *,
    turned: bool = False,
    turns: bool = False,
    apart: bool = False,
    biases: bool = True,
    gated: bool = True,
    hidden: int = HIDDEN,
    inner: int = INNER,
) -> dict[str, Any]:
    """A tensor, or a list of them, for every name that a kernel reads or writes.

    listed: one tensor an expert; turned: matrices are stored transposed; turns: gate and up in turns; apart: up is a
    tensor of its own.
    """
    ints, value = torch.int32, {"dtype": dtype}

    def weights(out: int, in_: int) -> list[torch.Tensor]:
        one = torch.zeros(EXPERTS, in_, out, **value).mT if turned else torch.zeros(EXPERTS, out, in_, **value)
        return [t.clone() for t in one] if listed else [one]

    def vectors(out: int) -> list[torch.Tensor]:
        if not biases:
            return []
        one = torch.zeros(EXPERTS, out, **value)
        return [t.clone() for t in one] if listed else [one]

    def pair(one: list[torch.Tensor]) -> list[torch.Tensor]:
        return [in_turns(tensor, 1) for tensor in one] if turns and gated else one

    apart = apart and gated
    wide = inner if apart or not gated else 2 * inner
    columns = 2 * inner if gated else inner
    tensors: dict[str, Any] = {
        "x": torch.zeros(TOKENS, hidden, **value),
        "grad_y": torch.zeros(TOKENS, hidden, **value),
        "y": torch.zeros(TOKENS, hidden, **value),
        "router": torch.zeros(EXPERTS, hidden, **value).t(),
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
        "act": torch.zeros(PAIRS, inner, **value),
        "preact": torch.zeros(PAIRS, columns, **value),
        "grad_preact": torch.zeros(PAIRS, columns, **value),
        "pairs": torch.zeros(PAIRS, hidden, **value),
        "gate": pair(weights(wide, hidden)),
        "up": weights(wide, hidden) if apart else [],
        "down": weights(hidden, inner),
        "grad_gate": pair(weights(wide, hidden)),
        "grad_up": weights(wide, hidden) if apart else [],
        "grad_down": weights(hidden, inner),
        "gate_bias": pair(vectors(wide)),
        "up_bias": vectors(wide) if apart else [],
        "down_bias": vectors(hidden),
        "grad_gate_bias": pair(vectors(wide)),
        "grad_up_bias": vectors(wide) if apart else [],
        "grad_down_bias": vectors(hidden),
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


def record_on(
    tensors: dict[str, Any],
    name: str,
    pdl: bool,
    dtype: torch.dtype,
    attrs: dict[str, Any] | None = None,
    **options: Any,
) -> list[Start]:
    """The starts of one launch of kernel `name` on these tensors; `attrs` instead of some of the usual ones."""
    traits = kernel(name).traits
    told = attributes(name, dtype) | {"turns": tensors["gate"][0].dim() == 4} | (attrs or {})
    with recording() as starts:
        kernel(name).launch(
            {key: tensors[key] for key in traits.writes if tensors[key] is not None},
            {key: tensors[key] for key in traits.reads},
            told,
            pdl=pdl,
            **options,
        )
    assert starts
    return starts
