"""Blocks on the GPU for tests of single kernels: sizes, layouts of weights and biases, routings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_compiler.runtime_kernels.weights import in_turns, out_size

TOKENS = (1, 2, 3, 17, 128, 1000)


@dataclass(frozen=True)
class Case:
    """One block: sizes, layout of the weights, data type, routing.

    Layouts: packed, transposed (contiguous columns), interleaved (the experts' rows alternate), separate, list,
    list_packed, turns and turned_columns (gate and up in turns in one tensor, stored by rows or by columns), up_first
    (as turned_columns, but up first: two views).
    """

    experts: int
    k: int
    hidden: int
    inner: int
    layout: str = "packed"
    dtype: torch.dtype = torch.bfloat16
    activation: str = "silu"
    gated: bool = True
    weight_at: str = "output"
    routing: str = "random"
    tokens: tuple[int, ...] = TOKENS
    biased: bool = False

    @property
    def name(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        gated = "gated" if self.gated else "plain"
        sizes = f"E{self.experts}k{self.k}H{self.hidden}I{self.inner}"
        biased = "-biased" if self.biased else ""
        return f"{sizes}-{self.layout}-{dtype}-{self.activation}-{gated}-{self.weight_at}-{self.routing}{biased}"


GPT_OSS = "silu(alpha=1.702,limit=0.7,shift=1.0)"  # a limit that many of the values here pass
# Rows of an expert beside the edges of tiles; those of the experts after them start over.
RAGGED = (0, 1, 15, 16, 17, 0, 63, 64, 65, 127, 128, 129)


def routing(case: Case, tokens: int) -> Tensor:
    """ids [tokens, k] int64 on the CPU; the last expert of a ragged routing gets what is left."""
    if case.routing == "ragged":
        pairs = tokens * case.k
        rows = torch.tensor([RAGGED[e % len(RAGGED)] for e in range(case.experts - 1)]).cumsum(0)
        ids = torch.searchsorted(rows, torch.arange(pairs), right=True)
        return ids[torch.randperm(pairs)].view(tokens, case.k)
    ids = torch.rand(tokens, case.experts).argsort(1)[:, : case.k]
    if case.routing == "one":
        return torch.full_like(ids, case.experts - 1)
    if case.routing == "skewed":  # expert 0 has most tokens, odd experts have none
        return torch.where(torch.rand(ids.shape) < 0.7, 0, ids // 2 * 2)
    if case.routing == "outside":
        ids = torch.where(torch.rand(ids.shape) < 0.3, case.experts + 2, ids)
        return torch.where(torch.rand(ids.shape) < 0.1, -1, ids)
    return ids


def weights_of(case: Case, device: str = "cuda") -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """gate, up, down on the device in the case's layout."""
    e, h, i = case.experts, case.hidden, case.inner
    packed = case.gated and case.layout in ("packed", "transposed", "interleaved", "list_packed")
    gate = torch.randn(e, 2 * i if packed else i, h) / h**0.5
    up = torch.randn(e, i, h) / h**0.5
    down = torch.randn(e, h, i) / i**0.5
    gate, up, down = (w.to(device=device, dtype=case.dtype) for w in (gate, up, down))
    if case.layout in ("turns", "turned_columns", "up_first"):
        both = torch.stack([gate, up], 2).flatten(1, 2)
        if case.layout != "turns":
            both, down = both.mT.contiguous().mT, down.mT.contiguous().mT
        if case.layout == "up_first":
            return [both[:, 1::2]], [both[:, 0::2]], [down]
        return [in_turns(both, 1)], [], [down]
    if case.layout == "transposed":
        gate, down = (w.mT.contiguous().mT for w in (gate, down))
    if case.layout == "interleaved":  # the experts' rows alternate
        gate, down = (w.transpose(0, 1).contiguous().transpose(0, 1) for w in (gate, down))
    if case.layout.startswith("list"):
        ups = [w.clone() for w in up] if case.gated and not packed else []
        return [w.clone() for w in gate], ups, [w.clone() for w in down]
    return [gate], [up] if case.gated and not packed else [], [down]


def biases_of(
    case: Case, gate: list[Tensor], up: list[Tensor], down: list[Tensor], device: str = "cuda"
) -> dict[str, list[Tensor]]:
    """The biases of the three projections, in a layout that goes with the weights'."""
    made: dict[str, list[Tensor]] = {}
    for name, weights in (("gate_bias", gate), ("up_bias", up), ("down_bias", down)):
        size = out_size(weights) if weights else 0
        rows = torch.randn(case.experts, size).to(device=device, dtype=case.dtype)
        made[name] = [] if not case.biased or not weights else list(rows.clone()) if len(weights) > 1 else [rows]
    if case.biased and case.layout in ("turns", "turned_columns"):
        made["gate_bias"] = [in_turns(made["gate_bias"][0], 1)]
    if case.biased and case.layout == "up_first":
        both = torch.stack([made["up_bias"][0], made["gate_bias"][0]], 2).flatten(1, 2)
        made |= {"gate_bias": [both[:, 1::2]], "up_bias": [both[:, 0::2]]}
    return made
