"""Which tiles are worth trying for a kernel of a block, likeliest first.

Rules generate every combination that the device code takes, limits of the device take out what cannot run, and an
estimate orders what is left: the search has a budget of time, and goes as far down the list as that lasts. The estimate
is no prediction of a time. It knows what a tile moves, multiplies and leaves idle, and is right about the order of very
different tiles only; near ones are for the measurement to tell apart.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from moe_compiler.runtime_kernels.tiles import (
    COLUMNS,
    DEPTHS,
    HOPPER_MULTIPROCESSORS,
    SIDES,
    TABLES,
    Tile,
    specialised_fits,
)

__all__ = ["Limits", "Work", "candidates", "estimate_us", "fits", "neighbours", "shared_bytes"]


@dataclass(frozen=True)
class Limits:
    """What a device allows: compute capability (major * 10 + minor), bytes of shared memory a program may ask for,
    multiprocessors."""

    capability: int
    shared: int
    multiprocessors: int


HOPPER = Limits(90, 232448, HOPPER_MULTIPROCESSORS)
# A program's 32-bit registers a thread, and those of a multiprocessor; results take at most half of a thread's.
_REGISTERS, _ALL_REGISTERS, _RESULTS = 255, 65536, 128
_THREADS, _PROGRAMS = 2048, 32
_ENDS = 16640
# Of an H200, measured: bytes a microsecond from memory, from L2 into shared memory, and FLOPs a microsecond; bytes that
# a multiprocessor must have in flight to keep the memory busy; the time around a tile's loop, and around a step's.
_MEMORY, _L2, _FLOPS = 4.3e6, 8.5e6, 7.9e8
_IN_FLIGHT, _TILE_US, _STEP_US = 40e3, 1.0, 0.05
# What is left of the memory's rate where a row of a step is 32, 64 or 128 bytes long.
_PIECES = {16: 0.7, 32: 0.85, 64: 0.96}
# Tiles whose estimate is so many times the best one's are left out.
_HOPELESS = 1.6


@dataclass(frozen=True)
class Work:
    """What a kernel of a block has to do at one number of tokens.

    sizes      of the block: k, E, H, I, N and w, the bytes of an element
    boxes      whether the weights can be read through tensor descriptors
    columns    whether the columns of the weights (their rows, as [out, in]) are what is contiguous in memory
    """

    kernel: str
    sizes: Mapping[str, int]
    tokens: int
    boxes: bool
    columns: bool = False

    @property
    def pairs(self) -> int:
        return self.tokens * self.sizes["k"]

    @property
    def sides(self) -> tuple[int, int]:
        """(what the products sum over, columns), for the gradients of weights the two sides of a matrix."""
        first, second = SIDES.get(self.kernel) or (DEPTHS[self.kernel], COLUMNS[self.kernel])
        return self.sizes[first], self.sizes[second]

    @property
    def parts(self) -> int:
        """Matrices that share the rows of a tile: gate and up."""
        return 2 if self.kernel.startswith("gate_up") and self.sizes["N"] == 2 * self.sizes["I"] else 1

    @property
    def hit(self) -> float:
        """Experts that get a row, under uniform routing."""
        experts, k = self.sizes["E"], self.sizes["k"]
        return experts * (1 - (1 - k / experts) ** self.tokens)

    @property
    def mean_rows(self) -> float:
        """Rows of an expert that is hit; of the router's matmul, all tokens."""
        return self.tokens if self.kernel == "router_logits" else self.pairs / self.hit


def _power(n: float) -> int:
    return 1 << max(math.ceil(math.log2(max(n, 1))), 0)


def _powers(least: int, most: int) -> list[int]:
    return [1 << n for n in range(least.bit_length() - 1, most.bit_length()) if least <= 1 << n <= most]


def candidates(work: Work, limits: Limits) -> list[Tile]:
    """Every tile worth trying, the likeliest first, unlike ones before variations of one.

    None for float32, whose products have one small tile.
    """
    if work.sizes["w"] != 2:
        return []
    makers = {"gate_up_few": _few, "down_few": _few, "combine": _sums, "router_logits": _router}
    make = makers.get(work.kernel) or (_gradients if work.kernel in SIDES else _grouped)
    found = dict.fromkeys(tile for tile in make(work, limits) if fits(work, tile, limits))
    estimates = {tile: estimate_us(work, tile, limits) for tile in found}
    likely = sorted(estimates, key=estimates.__getitem__)
    limit = _HOPELESS * min(estimates.values(), default=0.0)
    nth: dict[tuple[object, ...], int] = {}
    order: dict[Tile, tuple[int, int]] = {}
    for place, tile in enumerate(tile for tile in likely if estimates[tile] <= limit):
        shape = (tile.rows, tile.cols, tile.depth, tile.swap, tile.instead is not None)
        nth[shape] = nth.get(shape, -1) + 1
        order[tile] = (nth[shape], place)
    return sorted(order, key=order.__getitem__)


def neighbours(tile: Tile, pool: Sequence[Tile]) -> list[Tile]:
    """The tiles of the pool that differ from this one in one field, by one step of it."""

    names = [field.name for field in dataclasses.fields(Tile)]

    def steps(a: Tile, b: Tile) -> int:
        apart = 0
        for name in names:
            own, other = getattr(a, name), getattr(b, name)
            if own == other:
                continue
            near = name not in ("rows", "cols", "depth", "warps") or own in (2 * other, other // 2)
            near = near and (name != "stages" or abs(own - other) == 1)
            apart += 1 if near else 2
        return apart

    return [other for other in pool if steps(tile, other) == 1]


def _grouped(work: Work, limits: Limits) -> Iterator[Tile]:
    summed, columns = work.sides
    mean = work.mean_rows
    rows = [r for r in (16, 32, 64, 128) if r >= min(_power(mean) // 2, 128) and (r == 16 or r <= 4 * _power(mean))]
    for r in rows:
        for cols in _powers(32, min(256 // (work.parts if r >= 64 else 1), _power(columns))):
            for depth in _powers(32, min(128 if r >= 64 else 256, _power(summed))):
                if work.boxes and summed % depth:
                    continue
                for stages in range(2, 9):
                    for warps in (4, 8):
                        tile = Tile(r, cols, depth, warps, stages, tma=work.boxes)
                        yield from _ways(tile, work)
    # The last one of a table may be the form with specialised warps.
    hopper = TABLES[work.kernel].hopper
    if hopper and limits.capability == 90 and mean >= 64:
        _, last = hopper[-1]
        for cols in (128, 256):
            for stages in range(3, 8):
                for group in (1, 4, 8):
                    yield replace(last, cols=cols, stages=stages, group=group)


def _ways(tile: Tile, work: Work) -> Iterator[Tile]:
    """A tile with and without what changes its code but not its sizes."""
    swaps = (False, True) if tile.rows <= 64 and tile.cols >= 64 else (False,)
    groups = (1,) if tile.rows < 64 else (1, 8)
    halves = (False, True) if tile.rows >= 64 else (False,)
    registers = (None, 128) if tile.warps == 8 and tile.rows == 128 else (None,)
    for swap in swaps:
        for group in groups:
            for half in halves:
                for most in registers:
                    yield replace(tile, swap=swap, group=group, halves=half, registers=most)


def _gradients(work: Work, limits: Limits) -> Iterator[Tile]:
    token_side, ordered_side = work.sides
    for rows in _powers(64, min(128, _power(token_side))):
        for cols in _powers(64, min(256, _power(ordered_side))):
            for depth in (16, 32, 64):
                for stages in range(2, 8):
                    for warps in (4, 8):
                        for group in (1, 4, 8):
                            yield Tile(rows, cols, depth, warps, stages, group)


def _router(work: Work, limits: Limits) -> Iterator[Tile]:
    summed, columns = work.sides
    for rows in _powers(16, min(128, max(16, _power(work.tokens)))):
        for cols in _powers(16, min(128, max(16, _power(columns)))):
            for depth in _powers(32, min(256, _power(summed))):
                for stages in (2, 3, 4):
                    yield Tile(rows, cols, depth, 4, stages)


def _few(work: Work, limits: Limits) -> Iterator[Tile]:
    inner = work.sizes["H" if work.kernel == "gate_up_few" else "I"]
    # What is contiguous in memory must be so in a tile.
    deepest, sides = (512, (16 // work.parts, 128)) if work.columns else (4096, (1, 32))
    for depth in _powers(min(16 if work.columns else 128, _power(inner)), min(deepest, _power(inner))):
        for cols in _powers(*sides):
            if not 1024 <= cols * depth <= 8192:
                continue
            for warps in (2, 4, 8):
                for stages in (1, 2, 3, 4):
                    # One stage unrolls the loop: a long one takes a minute to compile.
                    if stages > 1 or -(-inner // depth) * (work.sizes["k"] if work.kernel == "down_few" else 1) <= 8:
                        yield Tile(1, cols, depth, warps, stages)


def _sums(work: Work, limits: Limits) -> Iterator[Tile]:
    for cols in _powers(128, min(4096, _power(work.sizes["H"]))):
        for warps in (1, 2, 4, 8):
            if 2 <= cols // (32 * warps) <= 32:
                yield Tile(1, cols, 1, warps)


def shared_bytes(work: Work, tile: Tile) -> int:
    """At most so many bytes of shared memory a program takes: its stages, with barriers and what the ends need."""
    if tile.rows == 1:
        # A loop that is unrolled keeps its loads in registers.
        ahead = 0 if work.kernel == "combine" else tile.stages - 1
        return ahead * (work.parts * tile.cols + 1) * tile.depth * 2 + 256
    one = (tile.rows + work.parts * tile.cols) * tile.depth * 2
    # With specialised warps results go through shared memory, a part of a tile at a time.
    return one * tile.stages + (_ENDS if tile.instead is not None else 256)


def fits(work: Work, tile: Tile, limits: Limits) -> bool:
    """Whether a program of this tile can run: shared memory, registers of its results, what the code takes."""
    if tile.rows == 1:
        # A thread's running sums are fp32: gate and up have one each.
        held = work.parts * tile.cols * tile.depth / (32 * tile.warps)
        return work.kernel == "combine" or (held <= _REGISTERS and shared_bytes(work, tile) <= limits.shared)
    if shared_bytes(work, tile) > limits.shared:
        return False
    if tile.instead is not None:
        return work.boxes and specialised_fits(tile, work.sides[0], work.sizes["E"])
    results = tile.rows * tile.cols * work.parts / (32 * tile.warps)
    if results > _RESULTS or results < 2:
        return False
    if tile.registers is not None and tile.registers <= results:
        return False
    # Warps divide the results in pieces of 16 x 8, a warpgroup those of 64 rows.
    wide = tile.cols if tile.swap else tile.rows
    return tile.warps == 4 or wide >= 128 or tile.cols * work.parts >= 128


def _resident(work: Work, tile: Tile, limits: Limits) -> int:
    """Programs of a multiprocessor at the same time."""
    threads = 32 * (tile.warps if tile.instead is None else 12)
    held = tile.rows * tile.cols * work.parts / threads + 40
    registers = min(tile.registers or _REGISTERS, held if tile.rows > 1 else 64)
    shared = shared_bytes(work, tile)
    by_shared = limits.shared // (shared + 1024) if shared else _PROGRAMS
    return max(1, min(by_shared, int(_ALL_REGISTERS // (registers * threads)), _THREADS // threads, _PROGRAMS))


def estimate_us(work: Work, tile: Tile, limits: Limits) -> float:
    """What a launch may take, in microseconds, for comparing tiles: see the module."""
    if tile.rows == 1:
        return _estimate_streaming(work, tile, limits)
    resident = _resident(work, tile, limits)
    if work.kernel in SIDES:
        programs, steps, useful, hangs = _gradient_tiles(work, tile)
    else:
        programs, steps, useful, hangs = _row_tiles(work, tile)
    wide = work.parts * tile.cols
    loaded = programs * steps * (tile.rows + wide) * tile.depth * 2
    # mma.sync, where neither side fills a warpgroup's 64 rows, does half of what the wgmma does.
    rate = _FLOPS * (1.0 if (tile.cols if tile.swap else tile.rows) >= 64 else 0.5)
    if tile.instead is None and tile.rows * wide < 128 * 256:
        rate *= (tile.rows * wide / (128 * 256)) ** 0.15
    multiplied = programs * steps * 2 * tile.rows * wide * tile.depth / rate
    buffered = resident * max(tile.stages - 1, 1) * (tile.rows + wide) * tile.depth * 2
    starved = max(1.0, _IN_FLIGHT / buffered)
    memory = useful * hangs / _MEMORY * starved / _PIECES.get(tile.depth, 1.0)
    waves = max(programs / (resident * limits.multiprocessors), 1e-9)
    idle = math.ceil(waves) / waves if waves < 16 else 1.0
    # The ends of tiles hide behind other programs of the multiprocessor, or behind specialised warps.
    alone = 0.3 if tile.instead is not None else 1.0 / resident
    ends = programs / limits.multiprocessors * (alone * _TILE_US + steps * _STEP_US / resident)
    # What one stage holds back of the overlap of loads and products, another program fills.
    held = min(loaded / _L2, multiplied) / (2 * resident * max(tile.stages - 1, 1))
    return (max(memory, loaded / _L2, multiplied) + held) * (1 + 0.3 * (idle - 1)) + ends


def _row_tiles(work: Work, tile: Tile) -> tuple[float, int, float, float]:
    """(tiles, steps of each, bytes that must come from memory, how many times as many come)."""
    summed, columns = work.sides
    width = -(-columns // tile.cols)
    if work.kernel == "router_logits":
        down = float(-(-work.tokens // tile.rows))
        useful = (work.tokens + columns) * summed * 2.0
    else:
        mean = work.mean_rows
        # An expert's last tile is half full on average; with halves it may be one of half the height.
        last = 0.25 if tile.halves else 0.5
        down = work.hit * max(1.0, mean / tile.rows + last) if mean > tile.rows / 2 else work.hit
        useful = work.hit * work.parts * columns * summed * 2.0 + work.pairs * (summed + columns) * 2.0
    return down * width, -(-summed // tile.depth), useful, width * tile.cols / columns


def _gradient_tiles(work: Work, tile: Tile) -> tuple[float, float, float, float]:
    token_side, ordered_side = work.sides
    down, width = -(-token_side // tile.rows), -(-ordered_side // tile.cols)
    experts = work.sizes["E"]
    steps = max(work.pairs / experts / tile.depth + 0.5, 1.0)
    useful = experts * token_side * ordered_side * 2.0
    return (
        float(experts * down * width),
        steps,
        useful,
        down * tile.rows * width * tile.cols / token_side / ordered_side,
    )


def _estimate_streaming(work: Work, tile: Tile, limits: Limits) -> float:
    """The kernels without a product of tiles: loads in flight decide."""
    sizes = work.sizes
    if work.kernel == "combine":
        programs, moved = work.tokens * -(-sizes["H"] // tile.cols), (work.pairs + work.tokens) * sizes["H"] * 2.0
        ahead = tile.cols * 2 * min(sizes["k"], 8)
    else:
        first = work.kernel == "gate_up_few"
        inner, across = (sizes["H"], sizes["I"]) if first else (sizes["I"], sizes["H"])
        parts = work.parts
        programs = (work.pairs if first else work.tokens) * -(-across // tile.cols)
        moved = work.pairs * parts * inner * across * 2.0
        ahead = (
            parts * tile.cols * tile.depth * 2 * (min(4, -(-inner // tile.depth)) if tile.stages == 1 else tile.stages)
        )
        moved *= -(-inner // tile.depth) * tile.depth / inner
        moved /= _PIECES.get(parts * tile.cols, 1.0) if work.columns else 1.0
    resident = _resident(work, tile, limits)
    waves = programs / (resident * limits.multiprocessors)
    busy = min(1.0, waves)
    starved = max(1.0, _IN_FLIGHT / (resident * busy * ahead + 1))
    idle = math.ceil(waves) / waves if waves < 16 else 1.0
    return moved / _MEMORY * starved * (1 + 0.3 * (idle - 1) * (waves > 1)) + programs / limits.multiprocessors * 0.02
