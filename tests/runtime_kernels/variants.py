"""Every variant of every device kernel that can be launched with the PDL attribute, as recorded starts.

They come from the tables that the launches themselves use: the kernels of the registry, the tiles of `TABLES` for a
data type on a device of compute capability 9.0 or later, the data types, the activations that are known, and the
layouts of weights. Each tile of each kernel comes with each data type that it is for and each layout; what the tiles
become for other sizes comes in one data type and layout; each epilogue comes with the tile that the kernel takes by
itself. What is new in a table is a new variant.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_compiler.runtime_kernels.activations import ACTIVATIONS
from moe_compiler.runtime_kernels.launching import DTYPES, Start
from moe_compiler.runtime_kernels.registry import kernel
from moe_compiler.runtime_kernels.tiles import TABLES, Tile, fitted
from tests.runtime_kernels.recorded import DEVICE_KERNELS, operands, record_on

LAYOUTS: dict[str, dict[str, bool]] = {
    "packed": {},
    "list": {"listed": True},
    "turned": {"turned": True},
    "turns": {"turns": True},
    "turned turns": {"turned": True, "turns": True},
    "apart": {"apart": True},
    "list apart": {"listed": True, "apart": True},
}
# Compute capabilities that have tiles of their own: Hopper, and what comes after it.
ON = (90, 100)
# Sizes that every tile divides, so that it takes the path that it was chosen for.
_SIZE = 256


@dataclass(frozen=True)
class Variant:
    """One way in which a kernel can be launched."""

    kernel: str
    dtype: torch.dtype = torch.bfloat16
    layout: str = "packed"
    tile: Tile | None = None
    epilogue: str = ""
    given: dict[str, Any] = field(default_factory=dict, compare=False)
    attrs: dict[str, Any] = field(default_factory=dict, compare=False)
    absent: tuple[str, ...] = field(default=(), compare=False)
    tokens: int | None = field(default=None, compare=False)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        tile = f"{self.tile.rows}x{self.tile.cols}x{self.tile.depth}" if self.tile is not None else "own tile"
        return " ".join(filter(None, (self.kernel, dtype, self.layout, tile, self.epilogue)))

    def starts(self) -> list[Start]:
        tensors = operands(self.dtype, hidden=_SIZE, inner=_SIZE, **LAYOUTS[self.layout], **self.given)
        tensors |= dict.fromkeys(self.absent)
        if self.tokens is not None:
            tensors |= {key: tensors[key][: self.tokens] for key in ("x", "logits")}
        options = {"tile": self.tile} if self.tile is not None else {}
        return record_on(tensors, self.kernel, True, self.dtype, self.attrs, **options)


def weighed(name: str) -> bool:
    """Whether a kernel reads or writes weights, whose layout is then a variant."""
    return bool(kernel(name).traits.lists)


def variants() -> Iterator[Variant]:
    """All of them, each once."""
    for name in DEVICE_KERNELS:
        for dtype in DTYPES:
            for layout in LAYOUTS if weighed(name) else ("packed",):
                table = TABLES.get(name)
                tiles = {tile for on in ON for _, tile in table.ranges(dtype, on)} if table is not None else {None}
                for tile in sorted(tiles, key=str):
                    yield Variant(name, dtype, layout, tile)
        for tile in fitted_tiles(name):
            yield Variant(name, tile=tile, epilogue="fitted")
        yield from _epilogues(name)


def fitted_tiles(name: str) -> list[Tile]:
    """What a kernel's tiles become for sizes that a step of 64 or 32 divides only, or with few columns."""
    table = TABLES.get(name)
    known = {tile for _, tile in table.ranges(torch.bfloat16, 90)} if table is not None else set()
    found = {fitted(name, tile, sizes) for tile in known for sizes in ((320, 256), (96, 256), (256, 64))}
    return sorted(found - known, key=str)


def _epilogues(name: str) -> Iterator[Variant]:
    traits = kernel(name).traits
    optional = set(traits.optional_reads)
    if "act" in traits.writes:
        for activation in sorted(ACTIVATIONS):
            for gated in (True, False):
                told = f"{activation} {'gated' if gated else 'alone'}"
                attrs = {"activation": activation, "gated": gated}
                yield Variant(name, epilogue=told, given={"gated": gated}, attrs=attrs)
    if name == "router_logits":
        yield Variant(name, epilogue="few tokens", tokens=4)
    if optional & {"gate_bias", "down_bias"} and not name.startswith("grad_gate_up_bias"):
        yield Variant(name, epilogue="no biases", given={"biases": False})
    for absent in sorted(optional & {"weights", "bias", "expert_scale", "router_bias"}):
        without = (absent, *(("grad_expert_scale",) if absent == "expert_scale" else ()))
        yield Variant(name, epilogue=f"no {absent}", absent=without)
    for absent in sorted(traits.optional_writes):
        if absent.startswith(("preact", "act", "grad_weights")):
            yield Variant(name, epilogue=f"no {absent}", absent=(absent,))
