"""What programmatic dependent launch promises on this GPU, and what it gains our chains.

    python -m benchmarks.pdl_probes              # on one GPU; writes docs/benchmarks/pdl*.json and .md

Three tables. `pdl`: races provoked on purpose, stale values read of all read. A producer lets its dependents start at
once, sleeps and only then stores, so that whoever does not wait for it is caught; each sequence is captured in a graph
and replayed. `pdl_edges`: which edges of a captured graph are programmatic when something stands in between.
`pdl_gain`: our chains with the attribute against the same chains without it, one call a graph, replays alone on the
device, and whether both compute the same bits on every replay while other traffic runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.timing import RESULTS, captured, device_us, median, table, write
from moe_compiler import timing
from moe_compiler.demo import backend_or_function, ignore_known_warnings
from moe_compiler.graph_edges import read_edges
from moe_compiler.testing import examples

BLOCKS, WIDTH = 32, 128
SLEEP_NS = 20_000
SIZES = {"experts": 128, "top_k": 8, "hidden": 2048, "intermediate": 768}
TOKENS = (1, 2, 8, 32, 128, 512, 2048, 8192)


@triton.jit
def _count(counter):
    tl.store(counter, tl.load(counter) + 1)


@triton.jit
def _writer(
    counter, target, nanoseconds, WIDTH: tl.constexpr, WAIT: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr
):
    """Store the counter into target after a sleep; the trigger comes first, last or not at all."""
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    if WAIT:
        tl.extra.cuda.gdc_wait()
    if FIRST:
        tl.extra.cuda.gdc_launch_dependents()
    begin = tl.extra.cuda.globaltimer()
    now = begin
    while now - begin < nanoseconds:
        now = tl.extra.cuda.globaltimer()
    tl.store(target + at, tl.zeros((WIDTH,), tl.int32) + tl.load(counter))
    if LAST:
        tl.extra.cuda.gdc_launch_dependents()


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
    begin = tl.extra.cuda.globaltimer()
    now = begin
    while now - begin < nanoseconds:
        now = tl.extra.cuda.globaltimer()
    tl.atomic_add(stale, tl.sum((tl.load(source + at) != tl.load(counter)).to(tl.int32), 0))


class Memory:
    """What the kernels of a probe share."""

    def __init__(self) -> None:
        self.counter, self.stale = (torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(2))
        self.data, self.other = (torch.zeros(BLOCKS * WIDTH, dtype=torch.int32, device="cuda") for _ in range(2))


def writer(
    m: Memory, *, pdl: bool = False, wait: bool = False, first: bool = True, other: bool = False, sleep: int = SLEEP_NS
) -> None:
    _writer[(BLOCKS,)](m.counter, m.other if other else m.data, sleep, WIDTH, wait, first, False, launch_pdl=pdl)


def reader(m: Memory, *, wait: str, pdl: bool = True) -> None:
    _reader[(BLOCKS,)](m.counter, m.data, m.stale, WIDTH, wait == "before", wait == "after", launch_pdl=pdl)


def write_after_read(m: Memory, wait: bool) -> None:
    writer(m, first=False, sleep=0)
    _slow_reader[(BLOCKS,)](m.counter, m.data, m.stale, SLEEP_NS, WIDTH)
    _overwriter[(BLOCKS,)](m.data, -1, WIDTH, wait, launch_pdl=True)


# (rule, what happens, stale values expected, the launches)
PROBES: tuple[tuple[str, str, bool, Callable[[Memory], object]], ...] = (
    (
        "R1",
        "producer triggers, sleeps, stores; consumer waits, reads",
        False,
        lambda m: (writer(m), reader(m, wait="before")),
    ),
    ("R2", "the same; consumer never waits", True, lambda m: (writer(m), reader(m, wait="never"))),
    (
        "R4",
        "a kernel between them that neither waits nor sleeps; consumer waits",
        False,
        lambda m: (writer(m), writer(m, pdl=True, other=True, sleep=0), reader(m, wait="before")),
    ),
    ("R5", "reader triggers, sleeps, reads; the next waits, overwrites", False, partial(write_after_read, wait=True)),
    ("R5", "the same; the next overwrites without waiting", True, partial(write_after_read, wait=False)),
    (
        "R6",
        "grand-producer's data read before the wait; the parent waits, then triggers and sleeps",
        False,
        lambda m: (writer(m), writer(m, pdl=True, wait=True, other=True), reader(m, wait="after")),
    ),
    (
        "R6",
        "the same; the parent triggers without waiting",
        True,
        lambda m: (writer(m), writer(m, pdl=True, other=True), reader(m, wait="after")),
    ),
)


def probe(rule: str, what: str, expected: bool, launches: Callable[[Memory], Any], replays: int) -> dict[str, Any]:
    m = Memory()

    def call(_: Any = None) -> None:
        _count[(1,)](m.counter)
        launches(m)

    replay = captured(call, [None])
    m.stale.zero_()
    for _ in range(replays):
        replay()
    torch.cuda.synchronize()
    stale, read = int(m.stale), replays * BLOCKS * WIDTH
    as_expected = (stale > 0) == expected
    return {
        "rule": rule,
        "sequence": what,
        "stale": stale,
        "read": read,
        "as the rule says": "yes" if as_expected else "NO",
    }


def edges(what: str, between: Callable[[Memory], object] | None) -> dict[str, Any]:
    """One row: how the edge into an attributed launch was captured when something stands before it."""
    m = Memory()

    def call() -> None:
        writer(m, sleep=0)
        if between is not None:
            between(m)
        reader(m, wait="before")

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        call()
    found = read_edges(graph)
    return {
        "between producer and consumer": what,
        "edges": len(found),
        "programmatic": sum(edge.programmatic for edge in found),
    }


def _join(m: Memory) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        m.other.add_(1)
    torch.cuda.current_stream().wait_stream(side)


def gain(tokens: int, replays: int) -> dict[str, Any]:
    """One row: the block's chain with and without the attribute."""
    torch.manual_seed(0)
    module = examples()["grouped_mm"](dtype=torch.bfloat16, **SIZES).module.cuda()
    x = torch.randn(tokens, SIZES["hidden"], dtype=torch.bfloat16, device="cuda")
    graphs: dict[str, Callable[[], object]] = {}
    results: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for way in ("on", "off"):
            torch._dynamo.reset()
            options = {"pdl": way, "require_match": True}
            compiled = torch.compile(module, backend=backend_or_function("moepdl"), options=options, dynamic=False)
            out = torch.empty_like(compiled(x))

            def call(_: Any, compiled: Any = compiled, out: torch.Tensor = out) -> None:
                out.copy_(compiled(x))

            results[way], graphs[way] = out, captured(call, [None])
        samples = device_us(graphs, rounds=100 if tokens <= 128 else 30)
        differing = 0
        traffic = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
        beside = torch.cuda.Stream()
        for index in range(replays):
            if index % 8 == 0:
                with torch.cuda.stream(beside):
                    traffic.add_(1)
            graphs["on"]()
            graphs["off"]()
            # Compared on the device, so that the replays follow each other closely.
            differing = differing + (results["on"] != results["off"]).any()
        torch.cuda.synchronize()
    on, off = (median(samples[way]) for way in ("on", "off"))
    return {
        "T": tokens,
        "off us": off,
        "on us": on,
        "gain us": round(off - on, 2),
        "on / off (95 %)": str(timing.ratio(samples["on"], samples["off"])),
        "replays": replays,
        "replays that differ": int(differing),
    }


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    p.add_argument("--replays", type=int, default=3000)
    p.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS))
    p.add_argument("--out", type=Path, default=RESULTS)
    arguments = p.parse_args(argv)
    ignore_known_warnings()
    save = partial(write, arguments.out, device="cuda")
    rows = [probe(*each, arguments.replays) for each in PROBES]
    notes = [f"Each sequence in one graph, {arguments.replays} replays; the sleep is {SLEEP_NS // 1000} us."]
    save("pdl", "Races provoked on purpose", rows, notes=notes)
    print(table(rows))
    between = (
        ("nothing", None),
        ("a fill", lambda m: m.other.zero_()),
        ("a copy", lambda m: m.other.copy_(m.data)),
        ("a join with another stream", _join),
    )
    rows = [edges(*each) for each in between]
    save("pdl_edges", "Edges of a captured graph", rows, notes=["The consumer is launched with the attribute."])
    print(table(rows))
    rows = []
    notes = [
        ", ".join(f"{key} {value}" for key, value in SIZES.items()) + ", bf16, router included; medians.",
        "One call in a graph; the replays of both are timed in turns, alone on the device.",
        "Bits compared at every replay, with a stream of memory traffic beside.",
    ]
    for tokens in arguments.tokens:
        rows.append(gain(tokens, max(100, arguments.replays * 64 // max(64, tokens))))
        save("pdl_gain", "What the attribute gains a block's chain", rows, notes=notes)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
