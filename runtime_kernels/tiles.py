"""How kernels divide their work: the tile that each takes for a data type, a number of rows an expert, and a device.

The tables are data, free of triton, so that the compiler can count programs without a device. They were found on an
H200 by benchmarks/kernels_h200.py --sweep, at sizes that every tile divides. An H100 has the same capability and takes
the same tiles. For other sizes `fitted` changes a tile by rules, and tuning (moe_compiler/tuning) finds one of its own.

A tile has a text, "64x128x64 w4 s3 g8 swap tma halves r128", in programs of chains, tables of tuned tiles and options.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace

import torch

__all__ = [
    "HOPPER_MULTIPROCESSORS",
    "TABLES",
    "Tile",
    "TileError",
    "TileTable",
    "check_tile",
    "choose_tile",
    "columns_tile",
    "fitted",
    "parse_tile",
    "slots",
    "specialised_fits",
]

HOPPER_MULTIPROCESSORS = 132
# Experts whose rows the kernels with specialised warps keep in registers, the group of none among them.
_SPECIALISED_EXPERTS = 512
# Rows of a tile of the kernels with specialised warps; kernels of a row a program.
_SPECIALISED_ROWS = 128
_SINGLE_ROWS = ("gate_up_few", "down_few", "combine")
_FLAGS = ("swap", "tma", "halves", "specialised")
_NUMBERS = {"w": "warps", "s": "stages", "g": "group", "r": "registers"}
_SIZES = re.compile(r"(\d+)x(\d+)x(\d+)")
_ELSE = ", else "


class TileError(ValueError):
    """A text that is no tile, or a tile that a kernel cannot take; the message says which part is wrong."""


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

    def __str__(self) -> str:
        """The text that `parse_tile` reads."""
        words = [f"{self.rows}x{self.cols}x{self.depth}", f"w{self.warps}", f"s{self.stages}"]
        words += [f"g{self.group}"] if self.group != 1 else []
        words += [flag for flag in _FLAGS[:3] if getattr(self, flag)]
        words += [f"r{self.registers}"] if self.registers is not None else []
        return " ".join(words) if self.instead is None else f"{' '.join([*words, 'specialised'])}{_ELSE}{self.instead}"


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


# The sizes that a tile's sides run over, by kernel, with the symbols of moe_compiler/cost: what the products sum over,
# what the columns cover, and for the gradients of weights what the rows cover.
DEPTHS = {"gate_up": "H", "down": "I", "grad_act": "H", "grad_pairs": "N", "router_logits": "H"}
COLUMNS = {"gate_up": "I", "down": "H", "grad_act": "I", "grad_pairs": "H", "router_logits": "E"}
SIDES = {"grad_down": ("H", "I"), "grad_gate_up": ("H", "N")}
# What a narrower tile must save before it is taken: estimates are no better.
_CLEARLY = 0.95
_LEAST_DEPTH, _LEAST_SIDE, _LEAST_SWAPPED = 32, 32, 64
_MOST_STAGES = 8


def choose_tile(kernel: str, dtype: torch.dtype, mean_rows: int, capability: int, sizes: tuple[int, int]) -> Tile:
    """The tile of a kernel for `mean_rows` rows an expert on a device of this compute capability (major * 10 + minor).

    sizes: (what the products sum over, columns), for the gradients of weights (token side, ordered side) of a matrix.
    Raises KeyError for a kernel that has no table.
    """
    for limit, tile in TABLES[kernel].ranges(dtype, capability):
        if limit is None or mean_rows <= limit:
            return fitted(kernel, tile, sizes)
    raise AssertionError(f"the tiles of {kernel} end before {mean_rows} rows an expert")


def fitted(kernel: str, tile: Tile, sizes: tuple[int, int]) -> Tile:
    """The tile for matrices of these sizes (see `choose_tile`).

    Depth: the tensor memory accelerator takes whole steps only, so a step that does not divide the sum is halved until
    it does, and the stages are doubled: as many bytes are in flight. Sides: a tile that hangs over the end of a matrix
    computes columns that are not there, and a narrower one reads its other operand more often; the cheaper is taken.
    """
    if kernel in SIDES:
        rows = _narrowed(sizes[0], tile.rows, tile.cols, _LEAST_SIDE)
        return replace(tile, rows=rows, cols=_narrowed(sizes[1], tile.cols, rows, _LEAST_SIDE))
    if not tile.tma:
        return tile
    if tile.instead is not None:
        return replace(tile, instead=fitted(kernel, tile.instead, sizes))
    summed, columns = sizes
    depth = tile.depth
    while summed % depth and depth > _LEAST_DEPTH:
        depth //= 2
    if summed % depth == 0 and depth < tile.depth:
        stages = min(_MOST_STAGES, tile.stages * tile.depth // depth)
        tile = replace(tile, depth=depth, stages=max(stages, tile.stages))
    parts = 2 if kernel == "gate_up" else 1
    least = _LEAST_SWAPPED if tile.swap else _LEAST_SIDE
    return replace(tile, cols=_narrowed(columns, tile.cols, tile.rows / parts, least))


# Of a kernel whose programs read pieces of rows. Measured on an H200 with gpt-oss-20b's layout at one, two and four
# tokens (docs/benchmarks/tiles.json): two programs a multiprocessor are worth more than whole lines of the cache, and a
# program that has the multiprocessor nearly to itself reads more at a time.
_PROGRAMS, _MANY_PROGRAMS = 2 * HOPPER_MULTIPROCESSORS, 4 * HOPPER_MULTIPROCESSORS
_LINE, _LEAST_PIECE = 128, 32
_STEP, _LARGE_STEP = 1 << 13, 1 << 14


def columns_tile(columns: int, depth: int, times: int, parts: int = 1, width: int = 2) -> Tile:
    """The tile of `gate_up_few` or `down_few` where a matrix's columns are what is contiguous in memory.

    columns   that a program may take neighbours of, of each of `parts` matrices that it reads
    depth     of the sum over a column; times: how often the columns are divided among programs (pairs or tokens)
    width     bytes of an element
    A piece of a row is a line of the cache. Narrower ones cost a part of the memory's rate, and are taken only where
    the programs would be too few.
    """

    def programs(piece: int) -> int:
        return max(times, 1) * -(-columns // (piece // width))

    piece = _LINE
    while piece > _LEAST_PIECE and programs(piece) < _PROGRAMS:
        piece //= 2
    large = piece > _LEAST_PIECE and programs(piece) < _MANY_PROGRAMS
    rows = (_LARGE_STEP if large else _STEP) // (piece * parts)
    while rows > 16 and rows // 2 >= depth:
        rows //= 2
    return Tile(1, piece // width, rows, warps=8 if large else 4, stages=4)


def _narrowed(size: int, side: int, other: float, least: int) -> int:
    """The side of a tile over `size`, or half of it and so on, where that clearly moves fewer bytes; other: its rows.

    A product of two tiles of a step reads both: (side + other) for side * other results, of which some are not there.
    """

    def cost(own: int) -> float:
        return -(-size // own) * own * (1 / own + 1 / other)

    while side // 2 >= least and cost(side // 2) < _CLEARLY * cost(side):
        side //= 2
    return side


def parse_tile(text: str) -> Tile:
    """The tile of a text. Raises TileError."""
    own, _, other = text.partition(_ELSE)
    first, *words = own.split() or [""]
    matched = _SIZES.fullmatch(first)
    if matched is None:
        raise TileError(f"tile {text!r}: it begins with {first!r}, not with ROWSxCOLSxDEPTH, e.g. 64x128x64")
    values: dict[str, int | bool] = dict(zip(("rows", "cols", "depth"), map(int, matched.groups()), strict=True))
    for word in words:
        key = _NUMBERS.get(word[:1]) if word[1:].isdecimal() else word if word in _FLAGS else None
        if key is None:
            known = ", ".join([*(f"{letter}<{name}>" for letter, name in _NUMBERS.items()), *_FLAGS])
            raise TileError(f"tile {text!r}: {word!r} is not one of {known}")
        if key in values:
            raise TileError(f"tile {text!r}: {word!r} says {key} a second time")
        values[key] = int(word[1:]) if word[1:].isdecimal() else True
    specialised = bool(values.pop("specialised", False))
    if specialised != bool(other):
        raise TileError(f"tile {text!r}: `specialised` and `{_ELSE.strip(', ')} TILE` come together")
    tile = Tile(**values, instead=parse_tile(other) if specialised else None)  # type: ignore[arg-type]
    _check_numbers(tile, text)
    return tile


def _check_numbers(tile: Tile, text: str) -> None:
    for name in ("rows", "cols", "depth", "warps"):
        value, most = getattr(tile, name), 16 if name == "warps" else 8192
        if not 1 <= value <= most or value & (value - 1):
            raise TileError(f"tile {text!r}: {name} is {value}, not a power of two up to {most}")
    for name, least, most in (("stages", 1, 16), ("group", 1, 64), ("registers", 24, 255)):
        value = getattr(tile, name)
        if value is not None and not least <= value <= most:
            raise TileError(f"tile {text!r}: {name} is {value}, not a number from {least} to {most}")


def check_tile(kernel: str, tile: Tile, tiled: Collection[str]) -> None:
    """Raise TileError unless a kernel can take a tile: for its form, not for its size. tiled: kernels that have one."""
    if kernel not in tiled:
        raise TileError(f"kernel {kernel} has no tile; those that have one: {', '.join(sorted(tiled))}")
    if kernel in _SINGLE_ROWS:
        if tile.rows != 1:
            raise TileError(f"{kernel} takes tiles of one row, not {tile}")
    elif min(tile.rows, tile.cols, tile.depth) < 16:
        raise TileError(f"{kernel} takes tiles of at least 16x16x16, not {tile}")
    if tile.instead is not None:
        specialised = [name for name, table in TABLES.items() if table.hopper]
        if kernel not in specialised:
            raise TileError(f"{kernel} has no form with specialised warps; {', '.join(specialised)} have")
        if tile.rows != _SPECIALISED_ROWS:
            raise TileError(f"{kernel} with specialised warps takes {_SPECIALISED_ROWS} rows, not {tile.rows}")
        check_tile(kernel, tile.instead, tiled)


def slots(pairs: int, experts: int, rows: int) -> int:
    """Tiles of `rows` rows that suffice for any distribution of `pairs` rows over the experts and the group of none."""
    return min(pairs, (pairs + (experts + 1) * (rows - 1)) // rows)


def specialised_fits(tile: Tile, depth: int, experts: int) -> bool:
    """Whether the kernel with specialised warps takes sizes: `depth` is what its products sum over."""
    return tile.instead is not None and depth % tile.depth == 0 and experts < _SPECIALISED_EXPERTS
