"""What registers may hold along a straight piece of machine code, told apart by the guards of what wrote them.

A guard is a predicate, and a predicate is written again and again. So what is kept is not the predicate's name but the
truth that it held: each time that a predicate changes it holds a truth of its own, which stays what it is for the rest
of the piece. A truth may also be kept in a register (`P2R`) while its predicate is used for something else, and come
back from there; then the predicate holds the old truth again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["NOTHING", "Condition", "Origin", "Origins", "Registers"]


@dataclass(frozen=True)
class Origin:
    """A parameter, its table's entries, or (without a name) a place in the parameters' own memory.

    at: bytes from the first parameter; None where it is not known.
    """

    name: str = ""
    entry: bool = False
    at: int | None = 0

    def moved(self, step: int | None, limit: int) -> Origin:
        if self.name:
            return self
        at = None if step is None or self.at is None else self.at + step
        return Origin(at=at if at is None or 0 <= at < limit else None)


Origins = frozenset[Origin]
NOTHING: Origins = frozenset()


@dataclass(frozen=True)
class _Truth:
    """What a predicate was found to be, once.

    number    its own
    of_warp   it is the same for all threads of the warp
    any_of    it is whether this holds in any thread of the warp
    """

    number: int = 0
    of_warp: bool = False
    any_of: Condition | None = None


class Condition(NamedTuple):
    """That a truth holds, or that it does not."""

    truth: _Truth
    holds: bool = True

    @property
    def of_warp(self) -> bool:
        """Whether it is the same for all threads of the warp."""
        return self.truth.of_warp

    def opposite(self) -> Condition:
        return Condition(self.truth, not self.holds)

    def in_any(self) -> Condition:
        """That it holds in any thread of the warp."""
        return self if self.of_warp else Condition(_Truth(of_warp=True, any_of=self))


class Registers:
    """The origins of registers along a straight piece of code.

    What an instruction with a guard writes is kept beside what was there before: an instruction with the same guard
    finds the one, an instruction with the opposite guard the other, any other one both; and what is computed of it
    without a guard is kept in the same way. Two guards are the same if their predicates hold the same truth. That goes
    on until nothing holds the truth any more, or the piece of code ends.

    A register of the whole warp is written where the guard holds in any thread. An instruction whose guard is that a
    thread's predicate does not hold therefore finds both there: other threads may have written it.
    """

    def __init__(self, state: Mapping[str, Origins]) -> None:
        self._always: dict[str, Origins] = dict(state)
        self._guarded: dict[str, dict[Condition, Origins]] = {}
        # What predicates hold, and what registers do that are zero if and only if it does not hold.
        self._truths: dict[str, Condition] = {}
        self._count = 0

    def condition(self, guard: str) -> Condition | None:
        """What lets an instruction with this guard ("@!P0") be executed; None for no guard."""
        if not guard:
            return None
        name = guard.lstrip("@!")
        held = self.truth(name) or self._new(name)
        return held.opposite() if guard.startswith("@!") else held

    def truth(self, name: str) -> Condition | None:
        """What a predicate or a register holds; None for a register that is not known to hold any."""
        held = self._truths.get(name)
        return self._new(name) if held is None and name.startswith(("P", "UP")) else held

    def hold(self, name: str, condition: Condition) -> None:
        """From now on a predicate, or a register that is not zero, says that the condition holds."""
        self._truths[name] = condition

    def read(self, register: str, guard: Condition | None = None) -> Origins:
        found = self._always.get(register, NOTHING)
        beside = self._guarded.get(register)
        if not beside:
            return found
        if guard is None:
            return found.union(*beside.values())
        for known in (guard, guard.in_any()):
            if known in beside:
                return beside[known]
        excluded = guard.opposite()
        return found.union(*(held for other, held in beside.items() if other != excluded))

    def conditions(self, register: str | int) -> Collection[Condition]:
        """The conditions under which this register may hold something else than otherwise."""
        return self._guarded.get(register, {}) if isinstance(register, str) else ()

    def write(self, register: str, origins: Origins, guard: Condition | None = None) -> None:
        self._truths.pop(register, None)
        if guard is None:
            self._always[register] = origins
            self._guarded.pop(register, None)
            return
        if register.startswith("UR"):
            guard = guard.in_any()
        beside = self._guarded.setdefault(register, {})
        opposite = guard.opposite()
        for other in [known for known in beside if known not in (guard, opposite)]:
            self._fold(register, other)
        beside[guard] = origins
        if opposite in beside:
            self._always[register] = NOTHING

    def beside(self, register: str, origins: Origins, condition: Condition) -> None:
        """What has just been written to a register is just this where the condition holds."""
        self._guarded.setdefault(register, {})[condition] = origins

    def changed(self, predicates: Collection[str]) -> None:
        """These predicates hold something new now. What nothing holds any more separates nothing any more."""
        if not predicates:
            return
        for name in predicates:
            self._truths.pop(name, None)
        kept = {condition.truth for condition in self._truths.values()}
        for register, beside in self._guarded.items():
            for known in [*beside]:
                of = known.truth.any_of
                if known.truth not in kept and (of is None or of.truth not in kept):
                    self._fold(register, known)

    def ended(self) -> dict[str, Origins]:
        """The state in which the piece of code is left."""
        for register in self._guarded:
            for condition in [*self._guarded[register]]:
                self._fold(register, condition)
        return self._always

    def _new(self, name: str) -> Condition:
        self._count += 1
        self._truths[name] = Condition(_Truth(self._count, of_warp=name.startswith("UP")))
        return self._truths[name]

    def _fold(self, register: str, condition: Condition) -> None:
        self._always[register] = self._always.get(register, NOTHING) | self._guarded[register].pop(condition)
