"""Every device kernel in every tile that it has, launched once on small blocks with ragged and empty experts.

What the kernels read is random but for the order of the rows, so no launch depends on another: this is for tools that
watch accesses, not for numbers. Under recording nothing is launched, and the device may be "cpu".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_compiler.runtime_kernels.order.reference import order, order_count
from moe_compiler.runtime_kernels.registry import Kernel, kernel
from moe_compiler.runtime_kernels.tiles import TABLES, Tile
from moe_compiler.runtime_kernels.weights import are_in_turns
from tests.gpu.cases import GPT_OSS, Case, biases_of, routing, weights_of
from tests.runtime_kernels.recorded import DEVICE_KERNELS, ROUTE

__all__ = ["BLOCKS", "Block", "launches"]


@dataclass(frozen=True)
class Block:
    """A case and its number of tokens. tiles: each kernel in each of its tiles, else in the one that it takes itself.

    kernels: only these.
    """

    case: Case
    tokens: int
    tiles: bool = False
    kernels: tuple[str, ...] = DEVICE_KERNELS


_FEW = ("router_logits", "route", "order", "gate_up_few", "down_few")
_PACKED = Case(13, 2, 256, 192, routing="ragged")
# Weights packed and one tensor an expert, sizes that tiles divide and others, few, some and many rows an expert.
BLOCKS = {
    "packed": Block(_PACKED, 150, tiles=True),
    "list, odd sizes": Block(replace(_PACKED, hidden=200, inner=72, layout="list", routing="outside"), 150, tiles=True),
    "few tokens": Block(_PACKED, 3, kernels=_FEW),
    "few tokens, list": Block(replace(_PACKED, hidden=200, inner=72, layout="list"), 3, kernels=_FEW),
    "many tokens": Block(Case(4, 2, 256, 192, routing="skewed"), 1000),
    "gpt-oss": Block(Case(13, 4, 160, 96, layout="turned_columns", activation=GPT_OSS, biased=True), 40),
    "apart, biased": Block(Case(13, 2, 136, 104, layout="separate", routing="ragged", biased=True), 70),
    "float32": Block(Case(5, 2, 50, 35, layout="interleaved", dtype=torch.float32, routing="outside"), 37, tiles=True),
    "float16, not gated": Block(Case(6, 2, 90, 46, dtype=torch.float16, gated=False, routing="one"), 20),
}


def launches(block: Block, device: str) -> Iterator[tuple[str, Any]]:
    """(what is launched, a function that launches it) for each kernel and tile of a block."""
    torch.manual_seed(0)
    tensors = _operands(block, device)
    for name in block.kernels:
        entry = kernel(name)
        if name.endswith("bias") and not block.case.biased:
            continue
        for tile in _tiles(block, name):
            told = "" if tile is None else f" {tile.rows}x{tile.cols}x{tile.depth}"
            yield name + told, _launch(block, entry, tensors, tile)


def _tiles(block: Block, name: str) -> list[Tile | None]:
    if not block.tiles or name not in TABLES:
        return [None]
    return sorted({tile for _, tile in TABLES[name].ranges(block.case.dtype, 90)}, key=str)


def _launch(block: Block, entry: Kernel, tensors: dict[str, Any], tile: Tile | None) -> Any:
    case, traits = block.case, entry.traits
    attrs: dict[str, Any] = {"k": case.k, "activation": case.activation, "gated": case.gated, "dtype": case.dtype}
    attrs |= {"save": True, "num_experts": case.experts, "turns": are_in_turns(tensors["gate"])}
    if entry.name.startswith("route"):
        groups = {"groups": 1, "kept_groups": 1, "group_top": 1}
        attrs |= {**ROUTE, **groups, "k": case.k, "score_dtype": torch.float32}
    options = {} if tile is None else {"tile": tile}

    def run() -> None:
        outs = {name: _like(tensors[name]) for name in traits.writes}
        ins = {name: tensors[name] for name in traits.reads}
        entry.launch(outs, ins, attrs, pdl=False, **options)

    return run


def _like(value: Any) -> Any:
    return [torch.empty_like(tensor) for tensor in value] if isinstance(value, list) else torch.empty_like(value)


def _operands(block: Block, device: str) -> dict[str, Any]:
    """A tensor, or a list of them, for every name that a kernel reads or writes; made on the CPU."""
    case, tokens = block.case, block.tokens
    pairs, wide = tokens * case.k, (2 if case.gated else 1) * case.inner
    ids = routing(case, tokens)
    perm, starts = order(ids, case.experts)
    gate, up, down = weights_of(case, device)

    def made(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return torch.randn(shape).to(device=device, dtype=dtype)

    parts = {"gate": gate, "up": up, "down": down, **biases_of(case, gate, up, down, device)}
    return {
        **parts,
        **{f"grad_{name}": value for name, value in parts.items()},
        "x": made(tokens, case.hidden),
        "grad_y": made(tokens, case.hidden),
        "y": made(tokens, case.hidden),
        "router": made(case.experts, case.hidden).t(),
        "router_bias": made(case.experts),
        "logits": made(tokens, case.experts),
        "grad_logits": made(tokens, case.experts),
        "bias": made(case.experts),
        "expert_scale": made(case.experts),
        "grad_expert_scale": made(case.experts),
        "weights": made(tokens, case.k),
        "grad_weights": made(tokens, case.k, dtype=torch.float32),
        "ids": ids.to(device),
        "counts": order_count(ids, case.experts).to(device),
        "perm": perm.to(device),
        "starts": starts.to(device),
        "act": made(pairs, case.inner),
        "preact": made(pairs, wide),
        "grad_preact": made(pairs, wide),
        "pairs": made(pairs, case.hidden),
    }
