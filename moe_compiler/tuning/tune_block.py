"""Tunes one block: which tasks there are, what the search found, and whether the whole chain gains by it.

A tile that wins by itself may lose in its chain, where its neighbours have left other things in the cache. So the chain
with the tiles that were found is timed against the chain without them, at each number of tokens, in turns; where it is
not faster, the kernels keep their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from moe_compiler.runtime_kernels.chain.program import Program
from moe_compiler.runtime_kernels.registry import kernel
from moe_compiler.runtime_kernels.tiles import COLUMNS, DEPTHS, SIDES
from moe_compiler.tuning.candidates import Limits, Work, candidates
from moe_compiler.tuning.compile_pool import CompilePool
from moe_compiler.tuning.search import Laboratory, Outcome, Task, search
from moe_compiler.tuning.tuned_tiles import Points, Stored, with_tiles

__all__ = ["LADDER", "Tuning", "limits_of", "tasks_of", "tune_block", "tune_on_device"]

# Numbers of tokens that serve every number: a point reaches twice as far and half as far.
LADDER = (1, 4, 16, 64, 256, 1024, 4096)
# Bytes of shared memory that a program may ask for, by capability, where torch does not tell.
_SHARED = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 103: 232448, 120: 101376}
# Of the time that may be spent, what the comparison of whole chains is left.
_SEARCH_SHARE = 0.85

ChainTimes = Callable[[int, Mapping[str, str]], Mapping[str, Sequence[float]]]


@dataclass(frozen=True)
class Tuning:
    """What was found for a block.

    points     by kernel and T; None where the kernel keeps its own tile
    chain_us   by T: the whole chain before, and with the tiles
    outcomes   of each task, for the record: what was tried and what was dropped
    complete   whether every pool was used up
    """

    block: str
    points: Points
    chain_us: Mapping[int, tuple[float, float]]
    outcomes: Sequence[Outcome]
    seconds: float
    complete: bool

    @property
    def tried(self) -> int:
        return sum(outcome.tried for outcome in self.outcomes)

    @property
    def dropped(self) -> dict[str, str]:
        """By "kernel tile" why a tile was not timed, each once."""
        return {f"{o.task.kernel} {tile}": why for o in self.outcomes for tile, why in o.dropped.items()}


# The weights that a kernel reads.
_READS = {
    "gate_up": ("gate", "up"),
    "gate_up_few": ("gate", "up"),
    "down": ("down",),
    "down_few": ("down",),
    "grad_act": ("down",),
    "grad_pairs": ("gate", "up"),
}


def _read(name: str, stored: Mapping[str, Stored]) -> list[Stored]:
    return [stored[weight] for weight in _READS.get(name, ()) if weight in stored]


@dataclass
class _Boxes:
    """Which kernels can read their weights through tensor descriptors."""

    stored: Mapping[str, Stored]
    capability: int

    def __call__(self, name: str) -> bool:
        read = _read(name, self.stored)
        return self.capability >= 90 and bool(read) and all(map(self._one, read))

    @staticmethod
    def _one(stored: Stored) -> bool:
        if len(stored.shape) not in (3, 4) or stored.count != 1:
            return False
        (out, inner), (step, unit) = stored.matrix
        expert = stored.stride[0]
        if unit != 1:
            step, unit, out, inner = unit, step, inner, out
        return unit == 1 and step % 8 == 0 and step >= inner and expert == out * step


def limits_of(device: torch.device | None = None) -> Limits:
    """What the current CUDA device allows."""
    found: Any = torch.cuda.get_device_properties(torch.cuda.current_device() if device is None else device)
    capability = 10 * found.major + found.minor
    told = getattr(found, "shared_memory_per_block_optin", 0) or _SHARED.get(capability, 101376)
    return Limits(capability, int(told), found.multi_processor_count)


def tasks_of(
    program: Program, sizes: Mapping[str, int], weights: Sequence[Stored], tokens: Sequence[int], limits: Limits
) -> list[Task]:
    """The kernels of a chain that may be tuned, at each of these numbers of tokens."""
    by_name = {stored.name: stored for stored in weights}
    boxes = _Boxes(by_name, limits.capability)
    found: list[Task] = []
    for count in sorted(tokens):
        variant = program.variant_for(count)
        for name in dict.fromkeys(launch.kernel for launch in variant.launches):
            if not kernel(name).traits.tiled or not _known(name, sizes):
                continue
            columns = any(stored.columns for stored in _read(name, by_name))
            pool = tuple(candidates(Work(name, sizes, count, boxes(name), columns), limits))
            if pool:
                found.append(Task(name, count, pool))
    return found


def _known(name: str, sizes: Mapping[str, int]) -> bool:
    sides = SIDES.get(name) or ((DEPTHS[name], COLUMNS[name]) if name in DEPTHS else ("H", "I", "N"))
    return {"k", "E", "w", *sides} <= sizes.keys()


def tune_block(
    program: Program,
    block: str,
    tokens: Sequence[int],
    tasks: Sequence[Task],
    laboratory: Laboratory,
    chain_times: ChainTimes,
    *,
    rows_a_token: float,
    budget_s: float,
    clock: Callable[[], float] = time.perf_counter,
    say: Callable[[str], None] = lambda text: None,
) -> Tuning:
    """Search, then keep what the whole chain gains by. `chain_times`: (T, texts by way) -> microseconds by way.

    A kernel that had no turn has points too, at all `tokens`: it keeps its own tile, and is not searched again.
    """
    began = clock()
    until = began + _SEARCH_SHARE * budget_s
    outcomes, stopped = search(tasks, laboratory, until=until, clock=clock, say=say)
    found: dict[str, dict[int, Any]] = {}
    for count in tokens:
        for launch in program.variant_for(count).launches:
            if kernel(launch.kernel).traits.tiled:
                found.setdefault(launch.kernel, {})[count] = None
    for task, outcome in outcomes.items():
        found[task.kernel][task.tokens] = outcome.best
    chain_us: dict[int, tuple[float, float]] = {}
    before = with_tiles(program, {}, rows_a_token).to_text()
    for count in sorted(set(tokens)):
        say(f"the whole chain, T={count}")
        here = {name: {count: points[count]} for name, points in found.items() if count in points}
        changed = any(tile is not None for points in here.values() for tile in points.values())
        texts = {"before": before}
        if changed:
            texts["after"] = with_tiles(program, here, rows_a_token).to_text()
        times = chain_times(count, texts)
        own_us = median(times["before"])
        after_us = median(times["after"]) if changed else own_us
        if after_us >= own_us:
            after_us = own_us
            for name in here:
                found[name][count] = None
        chain_us[count] = (own_us, after_us)
    return Tuning(block, found, chain_us, tuple(outcomes.values()), clock() - began, not stopped)


def tune_on_device(
    program: Program,
    block: str,
    sizes: Mapping[str, int],
    weights: Sequence[Stored],
    described: Callable[[int], Any],
    operands: Callable[[int], list[list[torch.Tensor]]],
    tokens: Sequence[int],
    *,
    budget_s: float,
    pool: CompilePool,
    say: Callable[[str], None] = lambda text: None,
) -> Tuning:
    """`tune_block` on the current CUDA device. described, operands: see `bench.Block`."""
    from moe_compiler.edge_timing import interleaved_us
    from moe_compiler.tuning.bench import Block, CudaLaboratory

    began = time.perf_counter()
    limits = limits_of()
    tasks = tasks_of(program, sizes, weights, tokens, limits)
    bare = with_tiles(program, {}, 1.0)
    laboratory = CudaLaboratory(Block(bare.to_text(), described, operands), pool, limits.shared)

    def chain_times(count: int, texts: Mapping[str, str]) -> Mapping[str, Sequence[float]]:
        return interleaved_us(operands(count), texts, rounds=15)

    try:
        laboratory.warm(tokens)
        return tune_block(
            bare,
            block,
            tokens,
            tasks,
            laboratory,
            chain_times,
            rows_a_token=sizes["k"] / sizes["E"],
            budget_s=max(budget_s - (time.perf_counter() - began), 1.0),
            say=say,
        )
    finally:
        pool.drop_waiting()
