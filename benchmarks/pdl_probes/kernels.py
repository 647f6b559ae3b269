"""The kernels that provoke races, the memory that they share, and a wait for the device that gives up."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import triton
import triton.language as tl

BLOCKS, WIDTH = 32, 128
SLEEP_NS = 20_000
GIVE_UP_S = 30.0


@triton.jit
def spin(nanoseconds):
    """Let time pass on the device; a million turns are a bound that no sleep here comes near."""
    begin = tl.extra.cuda.globaltimer()
    now = begin
    turns = 0
    while (now - begin < nanoseconds) & (turns < 1000000):
        now = tl.extra.cuda.globaltimer()
        turns += 1


@triton.jit
def _count(counter):
    tl.store(counter, tl.load(counter) + 1)


@triton.jit
def _writer(counter, target, nanoseconds, WIDTH: tl.constexpr, WAIT: tl.constexpr, FIRST: tl.constexpr):
    """Store the counter into target after a sleep; the trigger comes first or not at all."""
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    if WAIT:
        tl.extra.cuda.gdc_wait()
    if FIRST:
        tl.extra.cuda.gdc_launch_dependents()
    spin(nanoseconds)
    tl.store(target + at, tl.zeros((WIDTH,), tl.int32) + tl.load(counter))


@triton.jit
def _reader(counter, source, stale, WIDTH: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr):
    """Count the values of source that are not the counter's; the wait comes before the read, after it, or never."""
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    if BEFORE:
        tl.extra.cuda.gdc_wait()
    values = tl.load(source + at)
    if AFTER:
        tl.extra.cuda.gdc_wait()
    tl.atomic_add(stale, tl.sum((values != tl.load(counter)).to(tl.int32), 0))


@triton.jit
def _overwriter(target, value, WIDTH: tl.constexpr, WAIT: tl.constexpr):
    """Store into what the one before still reads."""
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    if WAIT:
        tl.extra.cuda.gdc_wait()
    tl.store(target + at, tl.zeros((WIDTH,), tl.int32) + value)


@triton.jit
def _slow_reader(counter, source, stale, nanoseconds, WIDTH: tl.constexpr):
    """Trigger, sleep, and only then read."""
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    tl.extra.cuda.gdc_launch_dependents()
    spin(nanoseconds)
    tl.atomic_add(stale, tl.sum((tl.load(source + at) != tl.load(counter)).to(tl.int32), 0))


class Memory:
    """What the kernels of a probe share."""

    def __init__(self) -> None:
        self.counter, self.stale = (torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(2))
        self.data, self.other = (torch.zeros(BLOCKS * WIDTH, dtype=torch.int32, device="cuda") for _ in range(2))


def count(m: Memory) -> None:
    _count[(1,)](m.counter)


def writer(
    m: Memory,
    *,
    pdl: bool = False,
    wait: bool = False,
    first: bool = True,
    target: torch.Tensor | None = None,
    sleep: int = SLEEP_NS,
) -> None:
    """Launch a writer of `target` (by default the data): with the attribute, a wait, a trigger ahead of the sleep?"""
    where = m.data if target is None else target
    _writer[(BLOCKS,)](m.counter, where, sleep, WIDTH, wait, first, launch_pdl=pdl)


def reader(m: Memory, *, wait: str, pdl: bool = True, cooperative: bool = False) -> None:
    """Launch a reader of the data that waits "before" it reads, "after" it, or "never"."""
    options = {"launch_cooperative_grid": True} if cooperative else {}
    _reader[(BLOCKS,)](m.counter, m.data, m.stale, WIDTH, wait == "before", wait == "after", launch_pdl=pdl, **options)


def slow_reader(m: Memory, source: torch.Tensor) -> None:
    _slow_reader[(BLOCKS,)](m.counter, source, m.stale, SLEEP_NS, WIDTH)


def overwriter(target: torch.Tensor, *, wait: bool) -> None:
    _overwriter[(BLOCKS,)](target, -1, WIDTH, wait, launch_pdl=True)


def wait_for(what: str, seconds: float = GIVE_UP_S) -> None:
    """Wait until the device is idle. Raises TimeoutError after `seconds`: torch.cuda.synchronize would wait forever."""
    event = torch.cuda.Event()
    event.record()
    end = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: the device has not finished within {seconds:.0f} s")
        time.sleep(1e-4)


def replayed(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The graph of one call, after one call that compiles its kernels; kept, so that its edges can be read."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        call()
    return graph
