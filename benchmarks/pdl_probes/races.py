"""P2 to P5: races provoked on purpose, stale values of all read.

A producer lets its dependents start at once, sleeps and only then stores, so that whoever does not wait for it is
caught. Each sequence is captured in a graph and replayed; what is read differs from replay to replay.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.pdl_probes.kernels import (
    BLOCKS,
    WIDTH,
    Memory,
    count,
    overwriter,
    reader,
    replayed,
    slow_reader,
    wait_for,
    writer,
)

# What a rule says of a sequence: every value read is right, some are stale, or nothing is promised.
RIGHT, STALE, OPEN = "right", "stale", "not promised"


def _write_after_read(m: Memory, wait: bool) -> None:
    writer(m, first=False, sleep=0)
    slow_reader(m, m.data)
    overwriter(m.data, wait=wait)


def _reused_scratch(m: Memory, wait: bool) -> None:
    """The allocator hands memory that was freed on this stream to the next launch, which may start early."""
    first = torch.empty_like(m.data)
    writer(m, first=False, sleep=0, target=first)
    slow_reader(m, first)
    address = first.data_ptr()
    del first
    held = [torch.empty_like(m.data)]
    while held[-1].data_ptr() != address:
        held.append(torch.empty_like(m.data))
        if len(held) > 1000:
            raise RuntimeError("the allocator does not hand out the memory that was just freed")
    overwriter(held[-1], wait=wait)


def _behind_a_waitless_one(m: Memory, pdl: bool) -> None:
    writer(m)
    writer(m, pdl=True, target=m.other, sleep=0)
    reader(m, wait="before" if pdl else "never", pdl=pdl)


def _grand_producer(m: Memory, wait: bool) -> None:
    writer(m)
    writer(m, pdl=True, wait=wait, target=m.other)
    reader(m, wait="after")


# (probe, rule, what happens, what the rule says, the launches)
PROBES: tuple[tuple[str, str, str, str, Callable[[Memory], object]], ...] = (
    (
        "P2",
        "R1",
        "producer triggers, sleeps, stores; consumer waits, reads",
        RIGHT,
        lambda m: (writer(m), reader(m, wait="before")),
    ),
    ("P4", "R2", "the same; consumer never waits", STALE, lambda m: (writer(m), reader(m, wait="never"))),
    (
        "P4",
        "R2",
        "producer sleeps, stores, never triggers; consumer never waits",
        OPEN,
        lambda m: (writer(m, first=False), reader(m, wait="never")),
    ),
    (
        "P3",
        "R4",
        "a kernel between them that neither waits nor sleeps; consumer waits",
        OPEN,
        partial(_behind_a_waitless_one, pdl=True),
    ),
    (
        "P3",
        "R4",
        "the same; consumer launched plainly, without a wait",
        OPEN,
        partial(_behind_a_waitless_one, pdl=False),
    ),
    (
        "P5",
        "R5",
        "reader triggers, sleeps, reads; the next waits, overwrites",
        RIGHT,
        partial(_write_after_read, wait=True),
    ),
    ("P5", "R5", "the same; the next overwrites without waiting", STALE, partial(_write_after_read, wait=False)),
    (
        "P5",
        "R5",
        "the reader's memory is freed and allocated anew; the next waits, writes it",
        RIGHT,
        partial(_reused_scratch, wait=True),
    ),
    ("P5", "R5", "the same; the next writes it without waiting", STALE, partial(_reused_scratch, wait=False)),
    (
        "GP",
        "R6",
        "grand-producer's data read before the wait; the parent waits, then triggers and sleeps",
        RIGHT,
        partial(_grand_producer, wait=True),
    ),
    ("GP", "R6", "the same; the parent triggers without waiting", STALE, partial(_grand_producer, wait=False)),
)


def verdict(says: str, stale: int) -> str:
    """What a count of stale values means for a rule."""
    if says == OPEN:
        return "not promised; none seen" if stale == 0 else "not promised, and not kept"
    return "as the rule says" if (stale > 0) == (says == STALE) else "AGAINST THE RULE"


def probe(
    name: str, rule: str, what: str, says: str, launches: Callable[[Memory], object], replays: int
) -> dict[str, Any]:
    """One row of the table."""
    m = Memory()

    def call() -> None:
        count(m)
        launches(m)

    graph = replayed(call)
    graph.instantiate()
    m.stale.zero_()
    for _ in range(replays):
        graph.replay()
    wait_for(what)
    stale = int(m.stale)
    return {
        "probe": name,
        "rule": rule,
        "sequence": what,
        "stale": stale,
        "read": replays * BLOCKS * WIDTH,
        "verdict": verdict(says, stale),
    }


def rows(replays: int) -> list[dict[str, Any]]:
    """The whole table."""
    return [probe(*each, replays) for each in PROBES]
