"""Checks and times the launches of a chain with different tiles. Needs a CUDA device.

A tile is timed in one CUDA graph of launches over different inputs, replayed; the tiles that are compared take turns,
and each round starts with another one. Before that its results are compared with those of the kernel's own tile: both
round the same sums in another order, so they may differ by roundings and by nothing else.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from moe_compiler.chain_runs import ChainRuns, light_graph
from moe_compiler.runtime_kernels.chain.prepared import prepare
from moe_compiler.runtime_kernels.launching import RefusedKernelWarning
from moe_compiler.runtime_kernels.tiles import Tile
from moe_compiler.tuning.compile_pool import CompilePool
from moe_compiler.tuning.compile_worker import Job
from moe_compiler.tuning.search import Task

__all__ = ["Bench", "Block", "CudaLaboratory"]

# Relative to the norm: roundings of results that were summed in another order.
_TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-3}
# A replay should take so long that its start is nothing beside it.
_REPLAY_US, _MOST_REPEATS = 200.0, 16
# Seconds to wait for other processes to compile what a chain launches by itself.
_OWN_S = 60.0


@dataclass(frozen=True)
class Block:
    """What is tuned: a chain's program, and operands for it.

    text        the program, without tiles, its launches programmatic where they may be
    described   T -> shape, strides and dtype of each operand
    operands    T -> operands on the device, one list an input; weights are shared
    """

    text: str
    described: Callable[[int], tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]]
    operands: Callable[[int], list[list[Tensor]]]


class Bench:
    """The launches of a chain for T tokens, each of which can be made again with another tile."""

    def __init__(self, text: str, runs: Sequence[Sequence[Tensor]]) -> None:
        self.runs = ChainRuns(text, runs)
        self._expected: dict[int, list[Tensor]] = {}

    def index(self, kernel: str) -> int:
        """The first launch of a kernel."""
        return self.runs.index(kernel)

    def problem(self, index: int, tile: Tile) -> str:
        """What is wrong with a tile: it cannot be launched, is refused by the audit, or its results differ; else ""."""
        results = self.runs.results(index)
        if index not in self._expected:
            self._poison(results)
            self.runs.launch(index, 0)
            self._expected[index] = [t.clone() for t in results]
        self._poison(results)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", RefusedKernelWarning)
                self.runs.launch(index, 0, tile)
            torch.cuda.synchronize()
        except Exception as error:
            problem = f"cannot be launched: {type(error).__name__}: {error}"
        else:
            errors = [_difference(got, want) for got, want in zip(results, self._expected[index], strict=True)]
            bad = [e for e, t in zip(errors, results, strict=True) if not e <= _TOLERANCE.get(t.dtype, 0.0)]
            problem = f"its results differ by {bad[0]:.2g} of their norm" if bad else ""
        for result, expected in zip(results, self._expected[index], strict=True):
            result.copy_(expected)
        return problem

    @staticmethod
    def _poison(results: Sequence[Tensor]) -> None:
        for result in results:
            result.fill_(float("nan") if result.is_floating_point() else -1)

    def times_us(self, index: int, tiles: Sequence[Tile | None], rounds: int) -> dict[Tile | None, float]:
        """Median microseconds of a launch with each tile."""
        unique = list(dict.fromkeys(tiles))
        if not unique:
            return {}
        once = self._rounds(index, {unique[0]: self._graph(index, unique[0], 1)}, 1, 2)[unique[0]]
        repeats = max(1, min(_MOST_REPEATS, round(_REPLAY_US / max(once * len(self.runs), 1.0))))
        graphs = {tile: self._graph(index, tile, repeats) for tile in unique}
        return self._rounds(index, graphs, repeats, rounds)

    def _graph(self, index: int, tile: Tile | None, repeats: int) -> torch.cuda.CUDAGraph:
        def rounds(count: int) -> None:
            for _ in range(count):
                for run in range(len(self.runs)):
                    self.runs.launch(index, run, tile)

        rounds(1)
        return light_graph(partial(rounds, repeats))

    def _rounds(
        self, index: int, graphs: dict[Tile | None, torch.cuda.CUDAGraph], repeats: int, rounds: int
    ) -> dict[Tile | None, float]:
        names = list(graphs)
        events = []
        for turn in range(rounds):
            first = turn % len(names)
            for tile in names[first:] + names[:first]:
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                graphs[tile].replay()
                end.record()
                events.append((tile, begin, end))
        torch.cuda.synchronize()
        found: dict[Tile | None, list[float]] = {tile: [] for tile in names}
        for tile, begin, end in events:
            found[tile].append(begin.elapsed_time(end) * 1e3 / (repeats * len(self.runs)))
        return {tile: median(times) for tile, times in found.items()}


def _difference(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm; not a number where either is."""
    if not want.is_floating_point():
        return 0.0 if torch.equal(got, want) else float("inf")
    apart = torch.linalg.vector_norm(got - want, dtype=torch.float32).item()
    norm = torch.linalg.vector_norm(want, dtype=torch.float32).item()
    return apart / norm if norm else (0.0 if apart == 0 else float("inf"))


class CudaLaboratory:
    """Compiles in worker processes and times on the current device: the `Laboratory` of `search`.

    shared: bytes of shared memory that a program may have.
    """

    def __init__(self, block: Block, pool: CompilePool, shared: int) -> None:
        self._block, self._pool, self._shared = block, pool, shared
        self._prepared = prepare(block.text)
        self._bench: tuple[int, Bench] | None = None
        self._described: dict[int, Any] = {}

    def warm(self, tokens: Sequence[int]) -> None:
        """Begin to compile what the chain launches by itself for these T, before anything else."""
        for count in tokens:
            variant = self._prepared.variant_of(count)
            for index, launch in enumerate(variant.launches):
                job = self._job(count, (variant.name, index), None, launch.pdl)
                self._pool.submit((self._block.text, count, index), job)

    def _job(self, tokens: int, where: tuple[str, int], tile: Tile | None, pdl: bool) -> Job:
        if tokens not in self._described:
            self._described[tokens] = self._block.described(tokens)
        return Job(
            program=self._block.text,
            launch=where,
            tensors=self._described[tokens],
            tile=None if tile is None else str(tile),
            pdl=pdl,
            shared=self._shared,
            arch=None,
        )

    def _bench_of(self, tokens: int) -> Bench:
        if self._bench is None or self._bench[0] != tokens:
            self._bench = None
            for index in range(len(self._prepared.variant_of(tokens).launches)):
                # What is not compiled by then is compiled here.
                self._pool.answer((self._block.text, tokens, index), _OWN_S)
            self._bench = (tokens, Bench(self._block.text, self._block.operands(tokens)))
        return self._bench[1]

    def _key(self, task: Task, tile: Tile) -> tuple[Any, ...]:
        """What the compiled code depends on; T is none of it."""
        launch = self._launch(task)[1]
        given = tuple(sorted(parameter for parameter, name in launch.ins if name is not None))
        taken = tuple(parameter for parameter, _ in launch.outs)
        return (self._block.text, task.kernel, given, taken, launch.pdl, tile)

    def _launch(self, task: Task) -> tuple[tuple[str, int], Any]:
        variant = self._prepared.variant_of(task.tokens)
        names = [launch.kernel.name for launch in variant.launches]
        index = names.index(task.kernel)
        return (variant.name, index), variant.launches[index]

    def prepare(self, task: Task, tiles: Sequence[Tile]) -> None:
        """Begin to compile these tiles."""
        where, launch = self._launch(task)
        for tile in tiles:
            self._pool.submit(self._key(task, tile), self._job(task.tokens, where, tile, launch.pdl))

    def ready(self, task: Task, tiles: Sequence[Tile], until: float) -> tuple[list[Tile], dict[Tile, str]]:
        """The tiles that were compiled in time and are right, and what is wrong with others."""
        good: list[Tile] = []
        dropped: dict[Tile, str] = {}
        for tile in tiles:
            answer = self._pool.answer(self._key(task, tile), until - time.perf_counter())
            if answer is None:
                continue
            problem = answer.problem
            if not problem:
                bench = self._bench_of(task.tokens)
                problem = bench.problem(bench.index(task.kernel), tile)
            if problem:
                dropped[tile] = problem
            else:
                good.append(tile)
        return good, dropped

    def times_us(self, task: Task, tiles: Sequence[Tile | None], rounds: int) -> dict[Tile | None, float]:
        """Median microseconds of each, taking turns."""
        bench = self._bench_of(task.tokens)
        return bench.times_us(bench.index(task.kernel), tiles, rounds)
