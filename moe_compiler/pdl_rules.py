"""The rules of programmatic dependent launch, as named checks over a sequence of launches.

A kernel launched with the PDL attribute may start while the one before it still runs. Its wait returns when the grids
that it depends on are complete and what they wrote can be read; a trigger only says that dependents may be started and
promises nothing about data (PTX ISA, griddepcontrol; CUDA programming guide, programmatic dependent launch). From that
follow two sets for launch k of a stream, both over what comes before it:

    may_run(k)  may still be running before k's wait: k-1, and may_run(k-1) if k-1 triggers before its wait or has none
    done(k)     is complete after k's wait: k-1, and done(k-1) if every thread of k-1 waited

A launch without the attribute starts when the one before it is complete, and counts as one that waited at its very
beginning. The checks take facts as plain values (`Grid`), whoever knows them: the kernels' declarations, the machine
code's audit, or a test. Each returns one `Violation` a fault; `check` runs them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

__all__ = ["RULES", "Grid", "Kind", "Trigger", "Violation", "Wait", "check", "check_captured", "done", "may_run"]


class Wait(Enum):
    """Which threads of a kernel wait before they touch memory that others write."""

    ALL = "every thread"
    SOME = "some threads or paths"
    NONE = "no thread"


class Trigger(Enum):
    """Where a kernel allows its dependents to start. Without a trigger they may when it exits."""

    NONE = "none"
    AFTER_WAIT = "after the wait"
    BEFORE_WAIT = "before the wait"


class Kind(Enum):
    """What a launch is. Only kernels can have programmatic edges."""

    KERNEL = "kernel"
    FILL = "fill or copy"
    HOST = "host function"
    JOIN = "join with another stream"
    COLLECTIVE = "collective"
    FOREIGN = "a launch of somebody else"


@dataclass(frozen=True)
class Grid:
    """One launch of a stream, in order.

    attribute            launched with programmatic stream serialisation
    wait, trigger        what its code does, as compiled
    early_reads, early_writes   storages that it touches before its wait
    reads, writes        storages that it touches after it
    constants            storages among its reads that nothing writes while the sequence runs (weights)
    non_coherent         storages that it reads past the coherent cache (ld.global.nc)
    spins                waits for other grids or peers by reading memory (flags, grid barriers)
    cooperative          launched as a cooperative grid; uniform: all blocks of a cluster take the same path
    fills_device         all of its blocks together can take every slot of the device
    audited              the facts above were read from the code that will run; compiled_for and device: capability x 10
    """

    name: str
    attribute: bool = False
    kind: Kind = Kind.KERNEL
    wait: Wait = Wait.ALL
    trigger: Trigger = Trigger.NONE
    early_reads: frozenset[str] = frozenset()
    early_writes: frozenset[str] = frozenset()
    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    constants: frozenset[str] = frozenset()
    non_coherent: frozenset[str] = frozenset()
    spins: bool = False
    cooperative: bool = False
    uniform: bool = True
    fills_device: bool = False
    audited: bool = True
    compiled_for: int = 90
    device: int = 90
    interprocess_event: bool = field(default=False)

    @property
    def touched(self) -> frozenset[str]:
        return self.early_reads | self.early_writes | self.reads | self.writes

    @property
    def written(self) -> frozenset[str]:
        return self.early_writes | self.writes

    @property
    def waited(self) -> bool:
        """Everything before it was complete before any of its blocks could end."""
        return not self.attribute or self.wait is Wait.ALL


@dataclass(frozen=True)
class Violation:
    """A launch that breaks a rule, and why; `storage` where it is about one."""

    rule: str
    launch: int
    grid: str
    reason: str
    storage: str = ""

    def __str__(self) -> str:
        return f"{self.rule}: launch {self.launch} ({self.grid}) {self.reason}"


# Launches that can have a programmatic edge to the next one.
_KERNELS = (Kind.KERNEL, Kind.FOREIGN)
# What ran before the sequence: an optimiser step, a weight load, anything.
_BEFORE = -1


def may_run(grids: Sequence[Grid], k: int) -> frozenset[int]:
    """The launches that may still be running when the code of launch k before its wait runs; -1 is what ran before."""
    if not grids[k].attribute:
        return frozenset()
    if k == 0:
        return frozenset({_BEFORE})
    before = grids[k - 1]
    if before.kind not in _KERNELS:
        return frozenset()
    late = not before.waited or before.trigger is Trigger.BEFORE_WAIT
    return frozenset({k - 1}) | (may_run(grids, k - 1) if late else frozenset())


def done(grids: Sequence[Grid], k: int) -> frozenset[int]:
    """The launches that are complete when the code of launch k after its wait runs (for no wait: none may be)."""
    if k == 0:
        return frozenset()
    if grids[k].attribute and grids[k].wait is not Wait.ALL and grids[k - 1].kind in _KERNELS:
        return frozenset()
    before = frozenset({k - 1})
    return before | done(grids, k - 1) if grids[k - 1].waited else before


def _names(storages: frozenset[str]) -> str:
    return ", ".join(sorted(storages))


Check = Callable[[Sequence[Grid], int], Iterator[tuple[str, str]]]


def _waits(grids: Sequence[Grid], k: int) -> Iterator[tuple[str, str]]:
    """R2: with the attribute, a kernel that touches memory waits, whether or not the one before it triggers."""
    grid = grids[k]
    if grid.attribute and grid.touched and grid.wait is Wait.NONE:
        yield "", "carries the attribute, touches memory and never waits"


def _every_thread_waits(grids: Sequence[Grid], k: int) -> Iterator[tuple[str, str]]:
    """R3: the wait is per thread: every thread, role and path has it ahead of what it touches."""
    grid = grids[k]
    if grid.attribute and grid.wait is Wait.SOME:
        yield "", "waits on some paths or in some threads only; one wait belongs at the top, ahead of all roles"


def _complete_after_wait(grids: Sequence[Grid], k: int) -> Iterator[tuple[str, str]]:
    """R4: what it reads or writes after its wait belongs to launches that its wait covers."""
    grid, covered = grids[k], done(grids, k)
    for j in range(k):
        if j in covered:
            continue
        for storage in sorted(grid.reads & grids[j].written):
            yield (
                storage,
                f"reads {storage}, which {grids[j].name} may not have written yet: no wait in between covers it",
            )
        for storage in sorted(grid.writes & grids[j].touched):
            yield storage, f"writes {storage}, which {grids[j].name} may still be using: no wait covers it"


def _writes_nothing_early(grids: Sequence[Grid], k: int) -> Iterator[tuple[str, str]]:
    """R5: nothing global is written before the wait: no output, no zeroing, no counter, no scratch memory."""
    grid = grids[k]
    if not grid.attribute:
        return
    running = may_run(grids, k)
    for storage in sorted(grid.early_writes):
        users = [grids[j].name for j in sorted(running) if j != _BEFORE and storage in grids[j].touched]
        used = f", which {' and '.join(users)} may still be using" if users else ""
        yield storage, f"writes {storage} before its wait{used}"


def _reads_constants_early(grids: Sequence[Grid], k: int) -> Iterator[tuple[str, str]]:
    """R6: before the wait only what no grid that may be running writes, and nothing behind a foreign launch."""
    grid = grids[k]
    if not grid.attribute or not grid.early_reads:
        return
    for j in sorted(may_run(grids, k)):
        if j == _BEFORE or grids[j].kind is Kind.FOREIGN:
            who = "what ran before the sequence" if j == _BEFORE else grids[j].name
            yield "", f"reads {_names(grid.early_reads)} before its wait, and {who} may still be writing that"
            continue
        for storage in sorted(grid.early_reads & grids[j].written):
            yield storage, f"reads {storage} before its wait while {grids[j].name} may still be writing it"


def _coherent_reads(grids: Sequence[Grid], k: int) -> Iterator[tuple[str, str]]:
    """R7: no load past the coherent cache of anything that a launch writes: such a load may move above the wait."""
    grid = grids[k]
    for storage in sorted(grid.non_coherent - grid.constants) if grid.attribute else ():
        yield storage, f"reads {storage} past the coherent cache; only constants may be read so"


def _follows_a_kernel(grids: Sequence[Grid], k: int) -> Iterator[tuple[str, str]]:
    """R8: programmatic edges exist between kernels only; behind a fill, a host function or a join they do nothing."""
    if grids[k].attribute and k and grids[k - 1].kind in (Kind.FILL, Kind.HOST, Kind.JOIN):
        yield (
            "",
            f"carries the attribute behind {grids[k - 1].name}, a {grids[k - 1].kind.value}: that edge is a full one",
        )


def _no_interprocess_events(grids: Sequence[Grid], k: int) -> Iterator[tuple[str, str]]:
    """R10: events fire at full completion, but none that other processes wait for is recorded behind early starts."""
    if grids[k].interprocess_event and grids[k].attribute:
        yield "", "records an event for other processes behind a programmatic launch"


def _collectives_are_barriers(grids: Sequence[Grid], k: int) -> Iterator[tuple[str, str]]:
    """R11: a collective is launched plainly, and it never lets dependents start early."""
    grid = grids[k]
    if grid.kind is Kind.COLLECTIVE and (grid.attribute or grid.trigger is not Trigger.NONE):
        yield "", "is a collective, which is launched plainly and does not trigger"


def _makes_progress(grids: Sequence[Grid], k: int) -> Iterator[tuple[str, str]]:
    """R12: who spins on others never lets dependents take their slots, and is not started early itself."""
    grid = grids[k]
    if grid.spins and grid.trigger is not Trigger.NONE:
        yield "", "spins on other grids or peers and triggers: dependents that wait may take the slots those need"
    if grid.spins and grid.attribute:
        yield "", "spins on other grids or peers and may be started early, before those have their slots"
    beside = any(other.kind is Kind.JOIN or other.spins for other in grids)
    if grid.attribute and grid.fills_device and beside and grids[k - 1].trigger is not Trigger.NONE:
        yield "", "can fill the device with waiting blocks while another stream must make progress"


def _one_path(grids: Sequence[Grid], k: int) -> Iterator[tuple[str, str]]:
    """R13: cooperative grids take no part, and the blocks of a cluster take one path."""
    grid = grids[k]
    if grid.attribute and grid.cooperative:
        yield "", "is a cooperative grid with the attribute, a combination that nobody vouches for"
    if grid.attribute and not grid.uniform:
        yield "", "has blocks of one cluster on different paths around the wait"


def _host_and_device_agree(grids: Sequence[Grid], k: int) -> Iterator[tuple[str, str]]:
    """R14: the attribute only where device and compiled code are sm_90 or newer, so that the wait is in the code."""
    grid = grids[k]
    if grid.attribute and min(grid.device, grid.compiled_for) < 90:
        yield "", f"carries the attribute, but its code is for sm_{grid.compiled_for} on an sm_{grid.device} device"


def _known_consumer(grids: Sequence[Grid], k: int) -> Iterator[tuple[str, str]]:
    """R15: a boundary is programmatic because of what its consumer's code does, never because of its producer's."""
    if grids[k].attribute and not grids[k].audited:
        yield "", "carries the attribute, and nothing shows what its own code does"


RULES: dict[str, Check] = {
    "R2 waits": _waits,
    "R3 every thread": _every_thread_waits,
    "R4 transitivity": _complete_after_wait,
    "R5 early writes": _writes_nothing_early,
    "R6 early reads": _reads_constants_early,
    "R7 coherent reads": _coherent_reads,
    "R8 kernels only": _follows_a_kernel,
    "R10 events": _no_interprocess_events,
    "R11 collectives": _collectives_are_barriers,
    "R12 progress": _makes_progress,
    "R13 one path": _one_path,
    "R14 host and device": _host_and_device_agree,
    "R15 the consumer's own": _known_consumer,
}


def check(grids: Sequence[Grid]) -> list[Violation]:
    """Every rule that a sequence of launches breaks; empty when it is safe.

    R1, what a wait and a trigger mean, is built into `may_run` and `done`; R9, the edges of a captured graph, is
    `check_captured`.
    """
    return [
        Violation(rule, k, grids[k].name, reason, storage)
        for rule, look in RULES.items()
        for k in range(len(grids))
        for storage, reason in look(grids, k)
    ]


def check_captured(grids: Sequence[Grid], programmatic: frozenset[tuple[int, int]]) -> list[Violation]:
    """R9: the programmatic edges read back from a captured graph, (from, to), are those of the attributed launches."""
    planned = {(k - 1, k) for k in range(1, len(grids)) if grids[k].attribute and grids[k - 1].kind in _KERNELS}
    found = []
    for edge in sorted(planned ^ programmatic):
        reason = "was planned to be programmatic and is not" if edge in planned else "is programmatic and not planned"
        name = grids[edge[1]].name
        found.append(Violation("R9 graph form", edge[1], name, f"has an edge from launch {edge[0]} that {reason}"))
    return found
