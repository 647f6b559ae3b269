"""Which parameters a kernel reads and writes through, derived from its machine code instead of from what is declared.

Each address in the code that will run is followed back to the parameter that it was computed from. For every register
at every place of the code the set of its possible origins is known: the parameters whose bits it may hold, the tables
whose entries, and the parameters' own memory (where a tensor's descriptor lies). Where ways meet the sets are joined,
so a set always contains the truth. An address is a pair of registers; what it leads to is in the sets of both. What is
loaded is a number, no address, unless it is loaded through a table of addresses: then it is told as `name[]`.

An address without an origin is told as lost, and so is everything that the analysis does not know (an instruction, a
jump through a register): a check that meets one fails.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_compiler.runtime_kernels.registry import Traits
from moe_compiler.runtime_kernels.sass import Code, Parameter, Place, UnknownFlowError, disassemble
from moe_compiler.runtime_kernels.sass_effects import Access, Effect, Flow, UnknownInstructionError, effect

__all__ = ["Accesses", "Address", "accesses", "accesses_of", "addresses", "undeclared"]

# Where in constant bank 0 the address of the parameters' own memory lies, by the generation.
_OWN_ADDRESS = {9: 0x198, 10: 0x348, 12: 0x348}


@dataclass(frozen=True)
class Accesses:
    """Names of a kernel's parameters: what it reads and writes through them, and what of that may precede its wait.

    lost: what could not be followed, as sentences: accesses whose address leads to no parameter, unknown instructions.
    """

    reads: frozenset[str]
    writes: frozenset[str]
    early: frozenset[str]
    lost: tuple[str, ...]


@dataclass(frozen=True)
class Address:
    """A parameter that is an address.

    table: it points to integers of 64 bits that are addresses; descriptor: it is a tensor's descriptor, by value.
    """

    name: str
    table: bool = False
    descriptor: bool = False


@dataclass(frozen=True)
class _Origin:
    """A parameter, its table's entries, or (without a name) a place in the parameters' own memory.

    at: bytes from the first parameter; None where it is not known.
    """

    name: str = ""
    entry: bool = False
    at: int | None = 0

    def moved(self, step: int | None, limit: int) -> _Origin:
        if self.name:
            return self
        at = None if step is None or self.at is None else self.at + step
        return _Origin(at=at if at is None or 0 <= at < limit else None)


_Origins = frozenset[_Origin]
_State = dict[str, _Origins]
_NONE: _Origins = frozenset()


class _Registers:
    """The origins of registers along a straight piece of code.

    What an instruction with a guard writes is kept beside what was there before: an instruction with the same guard
    finds the one, an instruction with the opposite guard the other, any other one both; and what is computed of it
    without a guard is kept in the same way. That holds until the guard's predicate changes, or the piece of code ends.
    """

    def __init__(self, state: Mapping[str, _Origins]) -> None:
        self._always: _State = dict(state)
        self._guarded: dict[str, dict[str, _Origins]] = {}
        # Guards that are the same as another one, by which what is written under them is kept.
        self._same: dict[str, str] = {}

    def read(self, register: str, guard: str = "") -> _Origins:
        found = self._always.get(register, _NONE)
        beside = self._guarded.get(register)
        if not beside:
            return found
        for same in (guard, self._same.get(guard, guard)):
            if same in beside:
                return beside[same]
        excluded = _opposite(register, guard)
        return found.union(*(held for other, held in beside.items() if other != excluded))

    def guards(self, register: str | int) -> Collection[str]:
        """The guards under which this register may hold something else than otherwise."""
        return self._guarded.get(register, {}) if isinstance(register, str) else ()

    def write(self, register: str, origins: _Origins, guard: str = "") -> None:
        if register.startswith("UR"):
            guard = self._same.get(guard, guard)
        if not guard:
            self._always[register] = origins
            self._guarded.pop(register, None)
            return
        beside = self._guarded.setdefault(register, {})
        opposite = _opposite(register, guard)
        for other in [g for g in beside if g not in (guard, opposite)]:
            self._fold(register, other)
        beside[guard] = origins
        if opposite in beside:
            self._always[register] = _NONE

    def beside(self, register: str, origins: _Origins, guard: str) -> None:
        """What has just been written to a register is just this where the guard holds."""
        self._guarded.setdefault(register, {})[guard] = origins

    def changed(self, predicates: Collection[str]) -> None:
        """These predicates may be others now."""
        self._same = {guard: same for guard, same in self._same.items() if guard.lstrip("@!") not in predicates}
        for gone in {same for same in self._same.values() if same.lstrip("@!") in predicates}:
            # Another guard that is the same takes its place.
            heir = next(guard for guard, same in self._same.items() if same == gone)
            del self._same[heir]
            self._rename(gone, heir)
            self._same = {guard: heir if same == gone else same for guard, same in self._same.items()}
        for register, beside in self._guarded.items():
            for guard in [g for g in beside if g.lstrip("@!") in predicates]:
                self._fold(register, guard)

    def equal(self, uniform: str, predicate: str) -> None:
        """From now on the first holds if and only if the second does in any thread of the warp.

        Then they are the same to registers of the warp. A thread's own register may be unwritten where only the first
        holds.
        """
        uniform, predicate = f"@{uniform}", f"@{predicate}"
        if predicate in self._same:
            self._same[uniform] = self._same[predicate]
        else:
            self._same[predicate] = uniform
            self._rename(predicate, uniform, "UR")

    def ended(self) -> _State:
        """The state in which the piece of code is left."""
        for register in self._guarded:
            for guard in [*self._guarded[register]]:
                self._fold(register, guard)
        return self._always

    def _fold(self, register: str, guard: str) -> None:
        self._always[register] = self._always.get(register, _NONE) | self._guarded[register].pop(guard)

    def _rename(self, guard: str, name: str, bank: str = "") -> None:
        for register, beside in self._guarded.items():
            if guard in beside and register.startswith(bank):
                beside[name] = beside.pop(guard) | beside.get(name, _NONE)


def _opposite(register: str, guard: str) -> str | None:
    """The guard under which nothing is seen of what `guard` lets be written to a register.

    There is none for a register of the whole warp and a guard of single threads: other threads may have written it.
    """
    if register.startswith("UR") and not guard.lstrip("@!").startswith("UP"):
        return None
    return guard.replace("@!", "@") if guard.startswith("@!") else guard.replace("@", "@!")


class _Analysis:
    """The origins of every register at every place of a kernel."""

    def __init__(self, code: Code, known: Mapping[int, Address]) -> None:
        self.code = code
        self.known = known
        self.effects: tuple[Effect, ...] = tuple(effect(instruction) for instruction in code.instructions)
        self.tables = {address.name for address in known.values() if address.table}
        self.words: dict[int, frozenset[_Origin]] = {}
        for number, address in known.items():
            parameter = code.parameters[number]
            if not address.descriptor:
                for offset in range(0, parameter.size, 4):
                    self.words[code.base + parameter.offset + offset] = frozenset({_Origin(address.name)})
        self.limit = max((p.offset + p.size for p in code.parameters), default=0)
        own = _OWN_ADDRESS.get(code.architecture // 10)
        if own is not None:
            self.words |= {own: frozenset({_Origin()}), own + 4: frozenset({_Origin()})}

    def found(self) -> Iterator[tuple[Place, Access, frozenset[str] | None]]:
        """Every access with the names of what it may lead to; None where that is not known."""
        for block, state in self._solved():
            registers = _Registers(state)
            for place in block:
                access = self.effects[place.index].access
                if access is not None:
                    yield place, access, self._leads_to(access, registers, self._guard(place))
                self._execute(place, registers)

    def _solved(self) -> Iterable[tuple[Sequence[Place], _State]]:
        """The straight pieces of the code with the state in which each is entered."""
        blocks, follows = self._blocks()
        entered: dict[Place, _State] = {Place(0): {}}
        rest = [Place(0)]
        while rest:
            head = rest.pop()
            registers = _Registers(entered[head])
            for place in blocks[head]:
                self._execute(place, registers)
            state = registers.ended()
            for behind in follows[head]:
                known = entered.get(behind)
                if known is None:
                    entered[behind] = dict(state)
                    rest.append(behind)
                elif _join(known, state):
                    rest.append(behind)
        return [(blocks[head], state) for head, state in entered.items()]

    def _blocks(self) -> tuple[dict[Place, list[Place]], dict[Place, tuple[Place, ...]]]:
        after = {place: self.code.after(place) for place in self.code.reached()}
        before: dict[Place, int] = defaultdict(int)
        heads = {Place(0)}
        for behind in after.values():
            for place in behind:
                before[place] += 1
            if len(behind) != 1:
                heads.update(behind)
        heads.update(place for place, count in before.items() if count > 1)
        blocks: dict[Place, list[Place]] = {}
        for head in heads:
            blocks[head] = [head]
            while len(ways := after[blocks[head][-1]]) == 1 and ways[0] not in heads:
                blocks[head].append(ways[0])
        return blocks, {head: after[block[-1]] for head, block in blocks.items()}

    def _guard(self, place: Place) -> str:
        instruction = self.code.instructions[place.index]
        return instruction.guard if instruction.conditional else ""

    def _execute(self, place: Place, registers: _Registers) -> None:
        effect, guard = self.effects[place.index], self._guard(place)
        new = [(flow, self._origins(flow, effect.access, registers, guard)) for flow in effect.flows]
        # Where a source depends on a guard, so does what is made of it.
        special: list[tuple[str, str, _Origins]] = []
        if not guard:
            for flow in effect.flows:
                for other in {g for source in flow.sources for g in registers.guards(source)} if not flow.adds else ():
                    special.append((flow.target, other, self._origins(flow, effect.access, registers, other)))
        registers.changed(effect.predicates)
        for flow, origins in new:
            if guard.lstrip("@!") in effect.predicates:
                # The guard is not what it was when it let this be written.
                registers.write(flow.target, origins | registers.read(flow.target))
                continue
            before = registers.read(flow.target, guard) if flow.adds else _NONE
            registers.write(flow.target, origins | before, guard)
        for target, other, origins in special:
            if other.lstrip("@!") not in effect.predicates:
                registers.beside(target, origins, other)
        if effect.any_of is not None:
            registers.equal(*effect.any_of)

    def _origins(self, flow: Flow, access: Access | None, registers: _Registers, guard: str) -> _Origins:
        found: set[_Origin] = set()
        for source in flow.sources:
            held = self.words.get(source, _NONE) if isinstance(source, int) else registers.read(source, guard)
            found.update(origin.moved(flow.step, self.limit) for origin in held)
        if flow.loaded and access is not None and self.tables:
            through = self._common(access, registers, guard)
            found.update(_Origin(o.name, True) for o in through if not o.entry and o.name in self.tables)
        return frozenset(found)

    def _common(self, access: Access, registers: _Registers, guard: str) -> _Origins:
        """What both words of an address may come from."""
        found: set[_Origin] = set()
        for low, high in access.pairs:
            lows, highs = registers.read(low, guard), registers.read(high, guard)
            own = any(not origin.name for origin in highs)
            found.update(origin for origin in lows if (origin in highs if origin.name else own))
        return frozenset(found)

    def _leads_to(self, access: Access, registers: _Registers, guard: str) -> frozenset[str] | None:
        origins = self._common(access, registers, guard)
        if access.tile:
            at = [self._descriptor(origin) for origin in origins]
            names = [name for name in at if name is not None]
        else:
            # An address in the parameters' own memory is no place where data lies.
            names = [f"{o.name}[]" if o.entry else o.name for o in origins if o.name]
        return frozenset(names) if names and len(names) == len(origins) else None

    def _descriptor(self, origin: _Origin) -> str | None:
        for number, address in self.known.items():
            parameter: Parameter = self.code.parameters[number]
            if address.descriptor and not origin.name and origin.at == parameter.offset:
                return address.name
        return None


def _join(known: _State, state: _State) -> bool:
    """Add to `known` what `state` has more; whether there was anything."""
    changed = False
    for register, origins in state.items():
        had = known.get(register, _NONE)
        if not origins <= had:
            known[register] = had | origins
            changed = True
    return changed


def accesses(code: Code, known: Mapping[int, Address]) -> Accesses:
    """Follow the accesses of a kernel. `known`: the parameters that are addresses, by their number."""
    try:
        waits = [n for n, i in enumerate(code.instructions) if i.kind == "ACQBULK" and not i.conditional]
        unwaited = set(code.reached(waits)) if waits else set()
        found = list(_Analysis(code, known).found())
    except (UnknownFlowError, UnknownInstructionError) as error:
        return Accesses(frozenset(), frozenset(), frozenset(), (str(error),))
    sets: dict[str, set[str]] = {"read": set(), "write": set(), "early": set()}
    lost: dict[str, None] = {}
    for place, access, names in found:
        if names is None:
            lost[f"an address cannot be followed: {code.instructions[place.index]}"] = None
            continue
        for kind in (*access.kinds, *(("early",) if place in unwaited else ())):
            sets[kind] |= names
    return Accesses(frozenset(sets["read"]), frozenset(sets["write"]), frozenset(sets["early"]), tuple(lost))


def accesses_of(compiled: Any) -> Accesses:
    """The accesses of a compiled kernel (what `triton.compile` or a launch returns), by its parameters' names."""
    return accesses(disassemble(compiled.asm["cubin"]), addresses(compiled.src.signature))


def addresses(signature: Mapping[str, Any]) -> dict[int, Address]:
    """The parameters of a kernel that are addresses, by their number in the machine code."""
    found: dict[int, Address] = {}
    number = 0
    for name, kind in _leaves(signature.items()):
        if kind == "constexpr":
            continue
        descriptor = kind.startswith("tensordesc<")
        if descriptor or kind.startswith("*"):
            # Expert ids are numbers of 64 bits too; one that is used as an address is then lost.
            table = kind == "*i64" and not name.endswith("ids")
            found[number] = Address(name, table, descriptor)
        # After a descriptor come its sizes and strides.
        number += 1 + 2 * (kind[kind.index("[") : kind.index("]")].count(",") + 1) if descriptor else 1
    return found


def _leaves(signature: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
    """The parameters one by one: a tuple is as many as it has elements."""
    for name, kind in signature:
        if isinstance(kind, tuple):
            yield from _leaves((f"{name}.{index}", element) for index, element in enumerate(kind))
        else:
            yield name, kind


def undeclared(traits: Traits, found: Accesses) -> list[str]:
    """How what a kernel does differs from what is declared of it; `found` by the names of `traits`, tables without [].

    Empty when it reads and writes what it says, no weight is written, and only weights are touched before the wait.
    """
    problems = [*found.lost]
    for what, names, allowed in (
        ("reads", found.reads, {*traits.reads, *traits.writes}),
        ("writes", found.writes, {*traits.writes}),
        ("touches before the wait", found.early, {*traits.weights}),
    ):
        problems += [f"{what} {name}, which is not declared so" for name in sorted(names - allowed)]
    problems += [f"writes {name}, which is declared constant" for name in sorted(found.writes & {*traits.weights})]
    return problems
