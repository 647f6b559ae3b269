"""Which parameters a kernel reads and writes through, derived from its machine code instead of from what is declared.

Each address in the code that will run is followed back to the parameter that it was computed from. For every register
at every place of the code the set of its possible origins is known: the parameters whose bits it may hold, the tables
whose entries, and the parameters' own memory (where a tensor's descriptor lies). Where ways meet the sets are joined,
so a set contains every parameter that it may be. A number is none: what is an address on one way and a number on
another counts as the address. What is written under a guard is told apart from what was there before (`origins`). What
threads share, the warp's registers and memory, may have been written by any of them. An address is a pair of registers;
what it leads to is in the sets of both. What is loaded is a number, no address, unless it is loaded through a table of
addresses: then it is told as `name[]`.

An address without an origin is told as lost, and so is everything that the analysis does not know (an instruction, a
jump through a register): a check that meets one fails.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_compiler.runtime_kernels.origins import NOTHING, Condition, Origin, Origins, Registers
from moe_compiler.runtime_kernels.registry import Traits
from moe_compiler.runtime_kernels.sass import Code, Parameter, Place, UnknownFlowError, disassemble
from moe_compiler.runtime_kernels.sass_effects import (
    SHARED,
    TENSOR,
    Access,
    Effect,
    Flow,
    UnknownInstructionError,
    effect,
)

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


_State = dict[str, Origins]
# Behind these a warp's threads may be others than those that came, even where there is one way only.
_PARTING = frozenset(["WARPSYNC", "BSYNC"])


class _Analysis:
    """The origins of every register at every place of a kernel."""

    def __init__(self, code: Code, known: Mapping[int, Address]) -> None:
        self.code = code
        self.known = known
        self.effects: tuple[Effect, ...] = tuple(effect(instruction) for instruction in code.instructions)
        self.tables = {address.name for address in known.values() if address.table}
        self.words: dict[int, Origins] = {}
        # What may lie in memory that threads share: any of them may have written it, in whatever piece of the code.
        self.memory: dict[str, Origins] = {SHARED: NOTHING, TENSOR: NOTHING}
        for number, address in known.items():
            parameter = code.parameters[number]
            if not address.descriptor:
                for offset in range(0, parameter.size, 4):
                    self.words[code.base + parameter.offset + offset] = frozenset({Origin(address.name)})
        self.limit = max((p.offset + p.size for p in code.parameters), default=0)
        own = _OWN_ADDRESS.get(code.architecture // 10)
        if own is not None:
            self.words |= {own: frozenset({Origin()}), own + 4: frozenset({Origin()})}

    def found(self) -> Iterator[tuple[Place, Access, frozenset[str] | None]]:
        """Every access with the names of what it may lead to; None where that is not known."""
        for block, state in self._solved():
            registers = Registers(state)
            for place in block:
                access = self.effects[place.index].access
                if access is not None:
                    yield place, access, self._leads_to(access, registers, self._guard(place, registers))
                self._execute(place, registers)

    def _solved(self) -> Iterable[tuple[Sequence[Place], _State]]:
        """The straight pieces of the code with the state in which each is entered."""
        blocks, follows = self._blocks()
        entered: dict[Place, _State] = {Place(0): {}}
        rest = [Place(0)]
        while rest:
            head = rest.pop()
            registers, memory = Registers(entered[head]), dict(self.memory)
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
            if self.memory != memory:
                rest.extend(head for head in entered if any(self._shares(place) for place in blocks[head]))
        return [(blocks[head], state) for head, state in entered.items()]

    def _shares(self, place: Place) -> bool:
        """Whether an instruction reads memory that threads share."""
        return any(source in self.memory for flow in self.effects[place.index].flows for source in flow.sources)

    def _blocks(self) -> tuple[dict[Place, list[Place]], dict[Place, tuple[Place, ...]]]:
        after = {place: self.code.after(place) for place in self.code.reached()}
        before: dict[Place, int] = defaultdict(int)
        heads = {Place(0)}
        for place, behind in after.items():
            for next_place in behind:
                before[next_place] += 1
            if len(behind) != 1 or self._parts(place):
                heads.update(behind)
        heads.update(place for place, count in before.items() if count > 1)
        blocks: dict[Place, list[Place]] = {}
        for head in heads:
            blocks[head] = [head]
            while len(ways := after[blocks[head][-1]]) == 1 and ways[0] not in heads:
                blocks[head].append(ways[0])
        return blocks, {head: after[block[-1]] for head, block in blocks.items()}

    def _parts(self, place: Place) -> bool:
        """Whether other threads of the warp may go on together than came: what any of them has may then be another."""
        instruction = self.code.instructions[place.index]
        return instruction.kind in _PARTING or (instruction.conditional and instruction.kind in ("EXIT", "KILL"))

    def _guard(self, place: Place, registers: Registers) -> Condition | None:
        instruction = self.code.instructions[place.index]
        return registers.condition(instruction.guard) if instruction.conditional else None

    def _execute(self, place: Place, registers: Registers) -> None:
        effect, guard = self.effects[place.index], self._guard(place, registers)
        new = [(flow, self._origins(flow, effect.access, registers, guard)) for flow in effect.flows]
        # Where a source depends on a guard, so does what is made of it.
        special: list[tuple[str, Origins, Condition]] = []
        if guard is None:
            for flow in effect.flows:
                for other in {known for source in flow.sources for known in registers.conditions(source)}:
                    # What holds in this thread need not hold in the one that a value of another or of the warp is from.
                    if other.of_warp or not (flow.across or flow.target.startswith("UR")):
                        special.append((flow.target, self._origins(flow, effect.access, registers, other), other))
        told = effect.same or effect.any_of
        held = registers.truth(told[1]) if told is not None else None
        registers.changed(effect.predicates)
        for flow, origins in new:
            if flow.target in self.memory:
                self.memory[flow.target] |= origins
            else:
                registers.write(flow.target, origins, guard)
        for target, origins, other in special:
            if target not in self.memory:
                registers.beside(target, origins, other)
        if told is not None and held is not None:
            registers.hold(told[0], held.in_any() if effect.any_of is not None else held)

    def _origins(self, flow: Flow, access: Access | None, registers: Registers, guard: Condition | None) -> Origins:
        if flow.across and guard is not None and not guard.of_warp:
            guard = None  # what another thread had may be from where this did not hold
        found: set[Origin] = set()
        for source in flow.sources:
            if isinstance(source, int):
                held = self.words.get(source, NOTHING)
            else:
                held = self.memory[source] if source in self.memory else registers.read(source, guard)
            found.update(origin.moved(flow.step, self.limit) for origin in held)
        if flow.loaded and access is not None and self.tables:
            through = self._common(access, registers, guard)
            found.update(Origin(o.name, True) for o in through if not o.entry and o.name in self.tables)
        return frozenset(found)

    def _common(self, access: Access, registers: Registers, guard: Condition | None) -> Origins:
        """What both words of an address may come from."""
        found: set[Origin] = set()
        for low, high in access.pairs:
            lows, highs = registers.read(low, guard), registers.read(high, guard)
            own = any(not origin.name for origin in highs)
            found.update(origin for origin in lows if (origin in highs if origin.name else own))
        return frozenset(found)

    def _leads_to(self, access: Access, registers: Registers, guard: Condition | None) -> frozenset[str] | None:
        origins = self._common(access, registers, guard)
        if access.tile:
            at = [self._descriptor(origin) for origin in origins]
            names = [name for name in at if name is not None]
        else:
            # An address in the parameters' own memory is no place where data lies.
            names = [f"{o.name}[]" if o.entry else o.name for o in origins if o.name]
        return frozenset(names) if names and len(names) == len(origins) else None

    def _descriptor(self, origin: Origin) -> str | None:
        for number, address in self.known.items():
            parameter: Parameter = self.code.parameters[number]
            if address.descriptor and not origin.name and origin.at == parameter.offset:
                return address.name
        return None


def _join(known: _State, state: _State) -> bool:
    """Add to `known` what `state` has more; whether there was anything."""
    changed = False
    for register, origins in state.items():
        had = known.get(register, NOTHING)
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
