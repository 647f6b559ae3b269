"""Tuned tiles as values: points by kernel and T, the block that they belong to, and the tiles that a chain takes.

A point says which tile was the fastest of a kernel at one number of tokens, or that it was the kernel's own. It serves
the numbers of tokens around it, at most twice as many or half as few: beyond, nothing is known, and the kernel chooses
by itself. Where an expert's tiles are full, more tokens change nothing: the last point then has no upper limit.

    {"E128 k8 H2048 I768 N1536 bfloat16 silu gate=rows down=rows": {"gate_up": {"8": "16x64x128 w4 s3 swap tma"}}}

is the form in files and in options["tiles"]; "own" stands for the kernel's own tile.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from moe_compiler.runtime_kernels.chain.program import Launch, Program, Variant
from moe_compiler.runtime_kernels.registry import tiled
from moe_compiler.runtime_kernels.tiles import Tile, TileError, check_tile, parse_tile

__all__ = [
    "OWN",
    "Blocks",
    "Points",
    "Stored",
    "block_text",
    "blocks_of",
    "missing",
    "options_text",
    "plain",
    "ranges",
    "with_tiles",
]

OWN = "own"
# kernel -> T -> tile, None for the kernel's own; and that by block.
Points = Mapping[str, Mapping[int, Tile | None]]
Blocks = Mapping[str, Points]

# How far from its T a point serves, and the rows an expert from which on its last point serves all larger T.
_REACH = 2
_FULL_ROWS = 256


@dataclass(frozen=True)
class Stored:
    """How a chain's weights are stored: the parameter's name, number of tensors, shape and strides of one."""

    name: str
    count: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def matrix(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Sizes and strides of an expert's matrix [out, in]; of gate and up in turns, [E, 2, I, in], of both."""
        if len(self.shape) == 4:
            return (self.shape[1] * self.shape[2], self.shape[3]), (self.stride[1], self.stride[3])
        return (self.shape[-2], self.shape[-1]), (self.stride[-2], self.stride[-1])

    @property
    def columns(self) -> bool:
        """Whether the rows (out) are nearer to each other in memory than the columns."""
        step, unit = self.matrix[1]
        return step < unit

    def __str__(self) -> str:
        """`gate=rows`: a matrix's rows are contiguous; `columns`, `strided`; `/4096`: their step, if not dense.

        `turns:`: its rows are those of gate and up in turns.
        """
        (rows, columns), (step, unit) = self.matrix
        how = "rows" if unit == 1 else "columns" if step == 1 else "strided"
        dense, own = {"rows": (columns, step), "columns": (rows, unit), "strided": (0, step)}[how]
        listed = {2: "list:", 4: "turns:"}.get(len(self.shape), "")
        return f"{self.name}={listed}{how}{'' if dense == own else f'/{own}'}"


def block_text(program: Program, sizes: Mapping[str, int], weights: Sequence[Stored]) -> str:
    """What tiles are found for: sizes, data type, activation, and how the weights are stored.

    sizes: k, E, H, I, N of `cost`, as far as they are known. Blocks with equal texts launch the same device code.
    """
    launches = [launch for variant in program.variants for launch in variant.launches]
    words = [f"{name}{sizes[name]}" for name in ("E", "k", "H", "I", "N") if name in sizes]
    words += sorted({stored.dtype for stored in weights})
    words += sorted({str(launch.attrs["activation"]) for launch in launches if "activation" in launch.attrs})
    words += [str(stored) for stored in weights]
    if any(name is not None and parameter.endswith("_bias") for launch in launches for parameter, name in _ins(launch)):
        words.append("biased")
    if any(launch.attrs.get("save") for launch in launches):
        words.append("saving")
    if any(launch.kernel.startswith("grad_") for launch in launches):
        words.append("backward")
    return " ".join(words)


def _ins(launch: Launch) -> list[tuple[str, str | None]]:
    return [(parameter, name) for parameter, name in launch.ins.items() if parameter != "router_bias"]


def ranges(points: Mapping[int, Tile | None], rows_a_token: float) -> tuple[tuple[int | None, str | None], ...]:
    """(largest T, tile) by growing T, the last for any T; None: the kernel's own. rows_a_token: k / E."""
    if not points:
        return ()
    found: list[tuple[int | None, str | None]] = []
    known = sorted(points)

    def serve(limit: int | None, tile: Tile | None) -> None:
        text = None if tile is None else str(tile)
        if found and found[-1][1] == text:
            found[-1] = (limit, text)
        elif limit is None or limit > (found[-1][0] or 0 if found else 0):
            found.append((limit, text))

    serve((known[0] - 1) // _REACH, None)
    for here, following in pairwise(known):
        if following > _REACH * _REACH * here:
            serve(_REACH * here, points[here])
            serve((following - 1) // _REACH, None)
        else:
            serve(math.isqrt(here * following), points[here])
    last = known[-1]
    if last * rows_a_token < _FULL_ROWS:
        serve(_REACH * last, points[last])
        serve(None, None)
    else:
        serve(None, points[last])
    return () if found == [(None, None)] else tuple(found)


def missing(points: Points, kernel: str, tokens: Sequence[int]) -> list[int]:
    """Those of `tokens` that no point of the kernel serves."""
    known = points.get(kernel, {})
    return [t for t in tokens if not any(t <= _REACH * own and own <= _REACH * t for own in known)]


def with_tiles(program: Program, points: Points, rows_a_token: float) -> Program:
    """The program with the tiles of these points on the launches of its variants, each for the T that it serves."""
    variants = []
    least = 1
    for variant in program.variants:
        launches = tuple(
            replace(launch, tiles=_within(ranges(points.get(launch.kernel, {}), rows_a_token), least, variant))
            for launch in variant.launches
        )
        variants.append(replace(variant, launches=launches))
        least = (variant.max_tokens or 0) + 1
    return replace(program, variants=tuple(variants))


def _within(
    tiles: tuple[tuple[int | None, str | None], ...], least: int, variant: Variant
) -> tuple[tuple[int | None, str | None], ...]:
    """The part of `tiles` for T from `least` up to the variant's limit, open at its end."""
    found = [(limit, tile) for limit, tile in tiles if limit is None or limit >= least]
    if variant.max_tokens is not None:
        last = next((i for i, (limit, _) in enumerate(found) if limit is None or limit >= variant.max_tokens), None)
        found = [] if last is None else [*found[:last], (None, found[last][1])]
    return () if [tile for _, tile in found] == [None] else tuple(found)


def plain(blocks: Blocks) -> dict[str, dict[str, dict[str, str]]]:
    """The form of files and options; `blocks_of` reads it."""
    return {
        block: {
            kernel: {str(t): OWN if tile is None else str(tile) for t, tile in sorted(by_tokens.items())}
            for kernel, by_tokens in sorted(points.items())
        }
        for block, points in sorted(blocks.items())
    }


def options_text(blocks: Blocks) -> str:
    """What fixes these tiles when it is pasted: `options={"tiles": ...}`; "" where no tile won.

    Of a kernel with a tile that won all points are in it: the others bound where that tile serves.
    """
    won = {
        block: {k: at for k, at in points.items() if any(tile is not None for tile in at.values())}
        for block, points in blocks.items()
    }
    won = {block: points for block, points in won.items() if points}
    return f'options={{"tiles": {json.dumps(plain(won))}}}' if won else ""


def blocks_of(data: Any) -> dict[str, dict[str, dict[int, Tile | None]]]:
    """The blocks of what `plain` wrote. Raises TileError, which says what is wrong and where."""
    if not isinstance(data, Mapping):
        raise TileError(f"tiles are a dict of blocks, not {type(data).__name__}")
    found: dict[str, dict[str, dict[int, Tile | None]]] = {}
    for block, points in data.items():
        if not isinstance(block, str) or re.match(r"E\d+ k\d+ H\d+ I\d+ N\d+ ", block) is None:
            raise TileError(f"block {block!r} does not begin with its sizes, E128 k8 H2048 I768 N1536 bfloat16 ...")
        if not isinstance(points, Mapping):
            raise TileError(f"block {block!r}: its kernels are a dict, not {type(points).__name__}")
        found[block] = {kernel: _points_of(block, kernel, by_tokens) for kernel, by_tokens in points.items()}
    return found


def _points_of(block: str, kernel: Any, by_tokens: Any) -> dict[int, Tile | None]:
    where = f"block {block!r}, kernel {kernel!r}"
    if kernel not in tiled():
        raise TileError(f"{where}: no such kernel has tiles; those that have them: {', '.join(tiled())}")
    if not isinstance(by_tokens, Mapping):
        raise TileError(f"{where}: its tiles are a dict by number of tokens, not {type(by_tokens).__name__}")
    found: dict[int, Tile | None] = {}
    for tokens, text in by_tokens.items():
        if not str(tokens).isdecimal() or int(tokens) < 1:
            raise TileError(f"{where}: {tokens!r} is no number of tokens")
        try:
            tile = None if text == OWN else parse_tile(str(text))
            if tile is not None:
                check_tile(kernel, tile, tiled())
        except TileError as error:
            raise TileError(f"{where}, T={tokens}: {error}") from None
        found[int(tokens)] = tile
    return found
