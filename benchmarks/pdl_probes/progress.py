"""P7: what dependents that start early do to a second stream, and to a producer that waits for that stream.

Two scenes, each a graph of two streams. `busy`: a producer of several waves, a dependent that fills the device, and a
small kernel on the second stream; how long does that one take to get through? `spinning`: a small producer polls a flag
that a kernel on the second stream sets, as kernels of an exchange do. Once its dependents have taken every slot, that
kernel cannot start. A polling block gives up after 2 ms, and is counted: it would hang, were it not bounded. And what a
fork and a join cost by themselves, which `moe_compiler.branches` has to assume.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.pdl_probes.kernels import replayed, spin, wait_for

WARPS = 4
GIVE_UP_NS = 2_000_000
WAVE_NS = 20_000
WAVES = 4
ROUNDS = 20


@triton.jit
def _wave(begin, nanoseconds, TRIGGER: tl.constexpr):
    """A block of a large grid; the first one notes when it began."""
    if tl.program_id(0) == 0:
        tl.store(begin, tl.extra.cuda.globaltimer())
    if TRIGGER:
        tl.extra.cuda.gdc_launch_dependents()
    spin(nanoseconds)


@triton.jit
def _poll(flag, gave_up, nanoseconds, TRIGGER: tl.constexpr):
    """Wait until the flag is set, but no longer than this."""
    if TRIGGER:
        tl.extra.cuda.gdc_launch_dependents()
    begin = tl.extra.cuda.globaltimer()
    now = begin
    turns = 0
    seen = tl.load(flag, volatile=True)
    while (seen == 0) & (now - begin < nanoseconds) & (turns < 10000000):
        now = tl.extra.cuda.globaltimer()
        seen = tl.load(flag, volatile=True)
        turns += 1
    tl.atomic_add(gave_up, (seen == 0).to(tl.int32))


@triton.jit
def _dependent(touched):
    """Waits with the slot that it has."""
    tl.extra.cuda.gdc_wait()
    tl.atomic_add(touched, 1)


@triton.jit
def _sleeper(nanoseconds):
    spin(nanoseconds)


@triton.jit
def _setter(flag):
    tl.store(flag, 1)


@triton.jit
def _beside(end):
    """A block of the second stream's kernel: the last one to run leaves the time."""
    tl.atomic_max(end, tl.extra.cuda.globaltimer())


def slots() -> tuple[int, int]:
    """(multiprocessors, blocks of WARPS warps that the device holds at a time)."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    of_one = properties.max_threads_per_multi_processor // (32 * WARPS)
    return properties.multi_processor_count, properties.multi_processor_count * of_one


def _forked(main: Callable[[], object], beside: Callable[[], object]) -> None:
    """Both on streams of their own, joined."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    main()
    with torch.cuda.stream(side):
        beside()
    torch.cuda.current_stream().wait_stream(side)


def busy(what: str, trigger: bool, dependents: int) -> dict[str, Any]:
    """A second stream beside a producer of several waves; medians of ROUNDS."""
    multiprocessors, capacity = slots()
    begin, end = (torch.zeros(1, dtype=torch.int64, device="cuda") for _ in range(2))
    touched = torch.zeros(1, dtype=torch.int32, device="cuda")

    def main() -> None:
        _wave[(WAVES * capacity,)](begin, WAVE_NS, trigger, num_warps=WARPS)
        _dependent[(dependents,)](touched, num_warps=WARPS, launch_pdl=True)

    def beside() -> None:
        _sleeper[(1,)](WAVE_NS, num_warps=1)
        _beside[(multiprocessors,)](end, num_warps=WARPS)

    def call() -> None:
        end.zero_()
        _forked(main, beside)

    graph = replayed(call)
    graph.instantiate()
    whole, other = [], []
    for _ in range(ROUNDS):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        graph.replay()
        marks[1].record()
        wait_for(what)
        whole.append(marks[0].elapsed_time(marks[1]) * 1e3)
        other.append((int(end) - int(begin)) / 1e3)
    return {
        "probe": "P7",
        "scene": what,
        "both us": median(whole),
        "second stream done after us": median(other),
        "gave up": 0,
        "verdict": "",
    }


def spinning(what: str, trigger: bool, dependents: int) -> dict[str, Any]:
    """A producer that polls what the second stream writes; polling blocks that gave up, of all."""
    multiprocessors, _ = slots()
    flag, gave_up, touched = (torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(3))

    def main() -> None:
        _poll[(multiprocessors,)](flag, gave_up, GIVE_UP_NS, trigger, num_warps=WARPS)
        _dependent[(dependents,)](touched, num_warps=WARPS, launch_pdl=True)

    def beside() -> None:
        _sleeper[(1,)](5 * WAVE_NS, num_warps=1)
        _setter[(1,)](flag, num_warps=WARPS)

    def call() -> None:
        flag.zero_()
        _forked(main, beside)

    graph = replayed(call)
    graph.instantiate()
    gave_up.zero_()
    whole = []
    for _ in range(ROUNDS):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        graph.replay()
        marks[1].record()
        wait_for(what)
        whole.append(marks[0].elapsed_time(marks[1]) * 1e3)
    hung = int(gave_up)
    return {
        "probe": "P7",
        "scene": what,
        "both us": median(whole),
        "second stream done after us": "",
        "gave up": f"{hung} of {ROUNDS * multiprocessors}",
        "verdict": "would hang" if hung else "progress",
    }


def fork_and_join() -> dict[str, Any]:
    """What a second stream costs: two sleeping kernels, one after the other and beside each other, between two more."""
    ways: dict[str, float] = {}
    for way in ("one stream", "two streams"):

        def call(beside: bool = way == "two streams") -> None:
            _sleeper[(1,)](WAVE_NS, num_warps=1)
            if beside:
                _forked(lambda: _sleeper[(1,)](WAVE_NS, num_warps=1), lambda: _sleeper[(1,)](WAVE_NS, num_warps=1))
            else:
                _sleeper[(1,)](WAVE_NS, num_warps=1)
                _sleeper[(1,)](WAVE_NS, num_warps=1)
            _sleeper[(1,)](WAVE_NS, num_warps=1)

        graph = replayed(call)
        graph.instantiate()
        times = []
        for _ in range(ROUNDS):
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            marks[0].record()
            graph.replay()
            marks[1].record()
            wait_for("a fork and a join")
            times.append(marks[0].elapsed_time(marks[1]) * 1e3)
        ways[way] = median(times)
    cost = ways["two streams"] - (ways["one stream"] - WAVE_NS / 1e3)
    return {
        "probe": "P7",
        "scene": "a fork and a join around two sleeping kernels",
        "both us": ways["two streams"],
        "second stream done after us": "",
        "gave up": 0,
        "verdict": f"costs {cost:.1f} us more than the kernels",
    }


def rows() -> list[dict[str, Any]]:
    """The whole table: each scene without a trigger, with one, and with few dependents."""
    multiprocessors, capacity = slots()
    found = [
        busy("several waves, no trigger, dependents fill the device", False, 2 * capacity),
        busy("several waves, trigger first, dependents fill the device", True, 2 * capacity),
        busy("several waves, trigger first, few dependents", True, multiprocessors),
    ]
    base = found[0]["second stream done after us"]
    for row in found:
        row["verdict"] = f"second stream {row['second stream done after us'] - base:+.1f} us"
    found += [
        spinning("polls the second stream, no trigger, dependents fill the device", False, 2 * capacity),
        spinning("polls the second stream, trigger first, few dependents", True, multiprocessors),
        spinning("polls the second stream, trigger first, dependents fill the device", True, 2 * capacity),
        fork_and_join(),
    ]
    return found
