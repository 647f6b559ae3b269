"""The search for the fastest tile of each kernel, under a budget of time.

Each task (a kernel at one number of tokens) has its own tile and a pool of others, likeliest first. The search goes
round the tasks; in each turn a task tries the next few of its pool, then those that differ by one step from the best it
has found. What is tried in a turn is halved: all are timed briefly, the better half again for longer, and so on. So
when the time is up every task has had its share, and the likely tiles were tried everywhere.

Nothing here needs a device: who compiles, checks and times is given as a `Laboratory`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from moe_compiler.runtime_kernels.tiles import Tile
from moe_compiler.tuning.candidates import neighbours

__all__ = ["Laboratory", "Outcome", "Task", "search"]

# Tiles that a task tries in a turn, and the rounds of the first halving and of the last comparison.
_TURN = 8
# Of so many next ones of its pool.
_WINDOW = 3 * _TURN
_FIRST_ROUNDS, _LAST_ROUNDS = 3, 15
# Seconds between two words about where the search stands.
_SAY_S = 5.0
# Another tile must be so much faster than the kernel's own to be taken.
KEEP = 0.98


@dataclass(frozen=True)
class Task:
    """A kernel at one number of tokens. `own`: the tile it takes by itself, `pool`: others, likeliest first."""

    kernel: str
    tokens: int
    pool: tuple[Tile, ...]

    def __str__(self) -> str:
        return f"{self.kernel}, T={self.tokens}"


class Laboratory(Protocol):
    """Compiles and times launches. None stands for the kernel's own tile."""

    def prepare(self, task: Task, tiles: Sequence[Tile]) -> None:
        """Begin to compile these tiles; returns at once."""

    def ready(self, task: Task, tiles: Sequence[Tile], until: float) -> tuple[list[Tile], dict[Tile, str]]:
        """Wait for these tiles, until this time of the clock: those that can be timed, and why others cannot be.

        A tile that is in neither has not been compiled in time.
        """

    def times_us(self, task: Task, tiles: Sequence[Tile | None], rounds: int) -> dict[Tile | None, float]:
        """Microseconds of each, taking turns for so many rounds. What cannot be launched has infinity."""


@dataclass
class Outcome:
    """What was found for a task: the best tile (None: its own), both times, how many were tried, what was dropped."""

    task: Task
    best: Tile | None = None
    own_us: float = 0.0
    best_us: float = 0.0
    tried: int = 0
    dropped: dict[Tile, str] = field(default_factory=dict)


@dataclass
class _State:
    """Where the search of a task stands. compiled: tiles of its kernel that some task has tried."""

    outcome: Outcome
    rest: list[Tile]
    compiled: set[Tile]
    seen: set[Tile] = field(default_factory=set)
    next: list[Tile] = field(default_factory=list)
    idle: int = 0

    def choose(self) -> list[Tile]:
        """What the next turn tries: neighbours of the best one, and the next of the pool.

        Of the next ones those go first that are compiled already, for another number of tokens: compiling takes longer
        than timing does.
        """
        near: list[Tile] = []
        if self.outcome.best is not None:
            near = [tile for tile in neighbours(self.outcome.best, self.outcome.task.pool) if tile not in self.seen]
        near = near[: _TURN // 2 if self.rest else _TURN]
        fresh = [tile for tile in self.rest if tile not in self.seen and tile not in near]
        fresh[:_WINDOW] = sorted(fresh[:_WINDOW], key=lambda tile: tile not in self.compiled)
        near += fresh[: _TURN - len(near)]
        self.seen |= set(near)
        self.compiled |= set(near)
        self.rest = [tile for tile in self.rest if tile not in self.seen]
        return near


def search(
    tasks: Sequence[Task],
    laboratory: Laboratory,
    *,
    until: float,
    clock: Callable[[], float],
    say: Callable[[str], None] = lambda text: None,
    patience: int = 3,
) -> tuple[dict[Task, Outcome], bool]:
    """The outcome of each task, and whether it was stopped before its pools were used up (or by Ctrl-C).

    until: when to stop, by `clock`; what has been found by then counts. patience: a task is left alone after so many
    turns that brought nothing.
    """
    compiled: dict[str, set[Tile]] = {task.kernel: set() for task in tasks}
    states = {task: _State(Outcome(task), list(task.pool), compiled[task.kernel]) for task in tasks}
    turn, said = 0, float("-inf")
    try:
        while True:
            active = [state for state in states.values() if state.idle < patience]
            for state in active:
                state.next = state.choose()
                state.idle = state.idle if state.next else patience
            active = [state for state in active if state.next]
            if not active:
                return _finished(states), False
            for state in active:
                laboratory.prepare(state.outcome.task, state.next)
            for number, state in enumerate(active):
                if clock() >= until:
                    return _finished(states), True
                if number == 0 or clock() - said >= _SAY_S:
                    said = clock()
                    say(_told(states, turn, number, len(active), state.outcome.task))
                _turn(state, laboratory, until)
            turn += 1
    except KeyboardInterrupt:
        return _finished(states), True


def _told(states: Mapping[Task, _State], turn: int, number: int, count: int, task: Task) -> str:
    tried = sum(state.outcome.tried for state in states.values())
    known = [state.outcome for state in states.values() if state.outcome.own_us]
    ratio = sum(found.best_us for found in known) / max(sum(found.own_us for found in known), 1e-9)
    so_far = f", {tried} tiles tried, {ratio:.3f} of the time before" if known else ""
    return f"turn {turn + 1}, {number + 1}/{count} {task}{so_far}"


def _turn(state: _State, laboratory: Laboratory, until: float) -> None:
    found = state.outcome
    tiles, dropped = laboratory.ready(found.task, state.next, until)
    found.dropped |= dropped
    found.tried += len(tiles)
    best = found.best
    alive = _halved(found.task, tiles, laboratory)
    again = [None, *([best] if best is not None else []), *alive]
    times = laboratory.times_us(found.task, again, _LAST_ROUNDS)
    found.own_us = times[None]
    winner = min(again[1:], key=lambda tile: times[tile], default=None)
    if winner is None or times[winner] > KEEP * times[None]:
        winner = None
    found.best, found.best_us = winner, times[winner]
    state.idle = 0 if winner != best else state.idle + 1


def _halved(task: Task, tiles: Sequence[Tile], laboratory: Laboratory) -> list[Tile]:
    """The two fastest of `tiles`."""
    alive, rounds = list(tiles), _FIRST_ROUNDS
    while len(alive) > 2:
        times = laboratory.times_us(task, alive, rounds)
        alive = sorted((t for t in alive if times[t] < float("inf")), key=lambda t: times[t])[: -(-len(alive) // 2)]
        rounds *= 2
    return alive


def _finished(states: Mapping[Task, _State]) -> dict[Task, Outcome]:
    return {task: state.outcome for task, state in states.items()}
