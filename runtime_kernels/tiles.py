"""How kernels divide their work: the tile that each takes for a data type, a number of rows an expert, and a device.

The tables are data, free of triton, so that the compiler can count programs without a device. They were found on an
H200 by benchmarks/kernels_h200.py --sweep.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["HOPPER_MULTIPROCESSORS", "TABLES", "Tile", "TileTable", "choose_tile", "slots", "specialised_fits"]

HOPPER_MULTIPROCESSORS = 132
# Experts whose rows the kernels with specialised warps keep in registers, the group of none among them.
_SPECIALISED_EXPERTS = 512


@dataclass(frozen=True)
class Tile:
    """How a kernel divides its work and what each program gets.

    rows, cols, depth   BM, BN, BK of the tile product
    warps, stages       warps a program, stages of the software pipeline
    group               row tiles that walk over the columns together
    swap                the matrix on the wide side of the tensor core (few rows)
    tma                 weights through tensor descriptors where their layout allows it
    halves              an expert's last tile is half as high when its rows allow it
    registers           at most so many a thread, so that more programs fit a multiprocessor
    instead             the kernel is the one with specialised warps (`specialised`), whose rows and warps are fixed;
                        where weights or sizes do not allow it, this tile's kernel takes its place
    """

    rows: int
    cols: int
    depth: int
    warps: int = 4
    stages: int = 3
    group: int = 1
    swap: bool = False
    tma: bool = False
    halves: bool = False
    registers: int | None = None
    instead: Tile | None = None


@dataclass(frozen=True)
class TileTable:
    """The tiles of one kernel.

    few     (largest mean number of rows an expert, tile), smallest first
    many    beyond, from compute capability 9.0 on; older: beyond, before it
    hopper  on capability 9.0 itself, instead of `many`: as `few`, the last one without a limit
    single  float32: as `few`, the last one without a limit
    """

    few: tuple[tuple[int, Tile], ...]
    many: Tile
    older: Tile
    single: tuple[tuple[int | None, Tile], ...]
    hopper: tuple[tuple[int | None, Tile], ...] = ()

    def ranges(self, dtype: torch.dtype, capability: int) -> tuple[tuple[int | None, Tile], ...]:
        """(largest mean number of rows, tile) for a data type on a device (major * 10 + minor); the last: None."""
        if dtype is torch.float32:
            return self.single
        if capability == 90 and self.hopper:
            return (*self.few, *self.hopper)
        return (*self.few, (None, self.many if capability >= 90 else self.older))


_SINGLE = ((16, Tile(16, 32, 32, stages=2)), (None, Tile(32, 32, 32, stages=2)))
_BY_EXPERT = ((12, Tile(16, 128, 128, stages=3, tma=True)), (24, Tile(32, 128, 128, stages=3, tma=True)))
_WEIGHTS = TileTable(
    # rows counts columns of the token side, cols those of the ordered side, depth the rows of a step.
    few=(
        (16, Tile(64, 128, 16, warps=4, stages=2, group=8)),
        (48, Tile(128, 128, 32, warps=4, stages=2, group=8)),
    ),
    many=Tile(128, 128, 32, warps=4, stages=5, group=4),
    older=Tile(128, 128, 32, warps=8, stages=3, group=8),
    single=((None, Tile(32, 32, 32, stages=2)),),
)
_OLDER = Tile(128, 128, 64, warps=8, stages=3, group=8)
_MANY_SCATTERED = Tile(128, 256, 64, warps=8, stages=4, group=8, tma=True, halves=True)
_SCATTERED = (
    (192, Tile(128, 256, 64, stages=4, group=8, tma=True, halves=True, instead=_MANY_SCATTERED)),
    (None, Tile(128, 256, 64, stages=4, group=4, tma=True, halves=True, instead=_MANY_SCATTERED)),
)

TABLES: dict[str, TileTable] = {
    # cols counts gate alone.
    "gate_up": TileTable(
        few=(
            (12, Tile(16, 64, 128, stages=3, swap=True, tma=True)),
            (24, Tile(32, 64, 128, stages=3, tma=True)),
            (48, Tile(64, 64, 64, stages=3, swap=True, tma=True, halves=True)),
        ),
        many=Tile(128, 128, 64, warps=8, stages=4, group=8, tma=True, halves=True),
        older=Tile(128, 64, 64, warps=8, stages=3, group=8),
        single=_SINGLE,
    ),
    "down": TileTable(
        few=(*_BY_EXPERT, (48, Tile(64, 128, 64, stages=4, tma=True))),
        many=_MANY_SCATTERED,
        older=_OLDER,
        single=_SINGLE,
        hopper=_SCATTERED,
    ),
    "grad_act": TileTable(
        few=(*_BY_EXPERT, (48, Tile(64, 64, 64, stages=3, tma=True))),
        many=Tile(128, 128, 64, warps=8, stages=3, tma=True, halves=True, registers=128),
        older=_OLDER,
        single=_SINGLE,
    ),
    "grad_pairs": TileTable(
        few=(*_BY_EXPERT, (48, Tile(64, 128, 64, stages=3, tma=True))),
        many=_MANY_SCATTERED,
        older=_OLDER,
        single=_SINGLE,
        hopper=_SCATTERED,
    ),
    # rows counts tokens; so does the number that chooses among them.
    "router_logits": TileTable(
        few=(
            (64, Tile(16, 16, 256)),
            (512, Tile(16, 32, 128, stages=4)),
            (2048, Tile(64, 32, 128, stages=5)),
            (4096, Tile(64, 64, 64, stages=4)),
        ),
        many=Tile(64, 128, 64, stages=5),
        older=Tile(64, 64, 64, stages=4),
        single=_SINGLE,
    ),
    "grad_down": _WEIGHTS,
    "grad_gate_up": _WEIGHTS,
}


def choose_tile(kernel: str, dtype: torch.dtype, mean_rows: int, capability: int) -> Tile:
    """The tile of a kernel for `mean_rows` rows an expert on a device of this compute capability (major * 10 + minor).

    Raises KeyError for a kernel that has no table.
    """
    for limit, tile in TABLES[kernel].ranges(dtype, capability):
        if limit is None or mean_rows <= limit:
            return tile
    raise AssertionError(f"the tiles of {kernel} end before {mean_rows} rows an expert")


def slots(pairs: int, experts: int, rows: int) -> int:
    """Tiles of `rows` rows that suffice for any distribution of `pairs` rows over the experts and the group of none."""
    return min(pairs, (pairs + (experts + 1) * (rows - 1)) // rows)


def specialised_fits(tile: Tile, depth: int, experts: int) -> bool:
    """Whether the kernel with specialised warps takes sizes: `depth` is what its products sum over."""
    return tile.instead is not None and depth % tile.depth == 0 and experts < _SPECIALISED_EXPERTS
