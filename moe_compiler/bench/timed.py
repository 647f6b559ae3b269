"""Times in microseconds, of calls and of CUDA graphs, of several ways in turns; and the memory that a call takes.

Every call of a way gets the next of the inputs, so that none finds its own input in a cache.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from moe_compiler import timing

__all__ = ["captured", "device_us", "host_us", "is_out_of_memory", "no_waiting", "own_stream", "peak_bytes", "rotating"]


def captured(call: Callable[[Any], object], inputs: Sequence[Any]) -> Callable[[], None]:
    """The replay of one CUDA graph that holds `call(x)` for each x of inputs, in order.

    It keeps `call` and `inputs`: a graph knows addresses, and does not hold the memory that it reads. Captured on the
    current stream, or on one of its own where that is the default stream.
    """
    current = torch.cuda.current_stream()
    stream = torch.cuda.Stream() if current == torch.cuda.default_stream() else current
    for x in inputs:
        call(x)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for x in inputs:
            call(x)
    current.wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for x in inputs:
            call(x)

    def replay(kept: object = (call, tuple(inputs))) -> None:
        graph.replay()

    return replay


@contextlib.contextmanager
def own_stream() -> Iterator[None]:
    """A stream that is not the default one, current inside; nothing where there is no GPU.

    Autograd accumulates a leaf's gradient on the stream that was current when the leaf was first used. Were that the
    default stream, a backward pass could not be captured for as long as anybody kept that first use alive.
    """
    if not torch.cuda.is_available():
        yield
        return
    before, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(before)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        before.wait_stream(stream)


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Operators of torch that make the host wait for the GPU raise RuntimeError inside."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def rotating(call: Callable[[Any], object], inputs: Sequence[Any]) -> Callable[[], object]:
    """A call without arguments that takes the inputs in turns."""
    turns = itertools.cycle(inputs)
    return lambda: call(next(turns))


def device_us(
    ways: Mapping[str, Callable[[], object]], *, calls: int = 1, rounds: int = 30, warmup: int = 5, row: int = 1
) -> dict[str, list[float]]:
    """Microseconds between two events around each way, in turns, divided by `calls`; idle device before each.

    row: how often a way is called when it is its turn; the median of those is one value. Where the host's time counts,
    a call right after another way's finds the CPU's caches full of that one's code, which no loop over a model does.
    """
    for call in ways.values():
        for _ in range(warmup):
            call()
    torch.cuda.synchronize()
    names = list(ways)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            times = []
            for _ in range(row):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda.synchronize()
                start.record()
                ways[name]()
                end.record()
                torch.cuda.synchronize()
                times.append(start.elapsed_time(end) * 1e3 / calls)
            samples[name].append(statistics.median(times))
    return samples


def host_us(ways: Mapping[str, Callable[[], object]], *, budget_s: float = 2.0) -> dict[str, list[float]]:
    """Microseconds of each call on a CPU, in turns; `budget_s` for all of them together."""
    seconds = timing.interleaved(ways, budget_s=budget_s, rounds=(3, 50), warmup=1)
    return {name: [value * 1e6 for value in samples] for name, samples in seconds.items()}


def peak_bytes(call: Callable[[], Any], kept: Callable[[Any], int]) -> int | None:
    """The most that a call has allocated at any time on the GPU, less `kept(result)` bytes that it leaves; else None.

    What was allocated before the call does not count.
    """
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    return max(0, torch.cuda.max_memory_allocated() - before - kept(result))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device, or the CPU, has no memory left."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
