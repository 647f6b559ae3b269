"""Which parameters a kernel reads and writes through, derived from its code instead of from what is declared of it.

Each address in the PTX is followed back to the parameter that it was computed from. PTX has a register for each value,
so that is exact but for joins, where all that a value may be counts; the assembler that makes machine code of it moves
accesses (`audit` looks at that), but to the same addresses. What is loaded is a number, no address, unless an access
has no other origin: then it goes through a table of addresses, and is told as `name[]`. An address that leads to no
parameter is told as lost, and a check that meets one fails.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_compiler.runtime_kernels.registry import Traits

__all__ = ["Accesses", "accesses", "accesses_of", "undeclared"]

_PREDICATE = re.compile(r"^@!?%p\d+\s+")
_REGISTER = re.compile(r"%(?!p\d)[a-z]+\d+")
_PARAMETER = re.compile(r"\w+_param_(\d+)")
_GROUP = re.compile(r"\{[^}]*\}|\[[^]]*\]|[^,{}\[\]]+")
_WAIT = "griddepcontrol.wait"
_DESCRIPTOR = re.compile(r"tensordesc<[^[]*\[([^]]*)\]")
# Accesses by the first words of the opcode, and which operand is the address in global memory.
_READS = {"ld.global": 1, "ldu.global": 1, "ld": 1, "cp.async": 1}
_WRITES = {"st.global": 0, "st": 0, "red": 0, "cp.reduce.async.bulk": 0}
_OF_SHARED = (".shared", ".local", ".param", ".const")


@dataclass(frozen=True)
class Accesses:
    """Names of a kernel's parameters: what it reads and writes through them, and what of that before its wait.

    lost: the accesses whose address leads to no parameter.
    """

    reads: frozenset[str]
    writes: frozenset[str]
    early: frozenset[str]
    lost: tuple[str, ...]


@dataclass(frozen=True)
class _Access:
    text: str
    kind: str
    address: tuple[str, ...]
    early: bool


def _instructions(ptx: str) -> list[str]:
    """The instructions of the entry, predicates stripped; labels and directives left out."""
    body = ptx[ptx.index("{", ptx.index(".entry")) :]
    body = re.sub(r"//[^\n]*|/\*.*?\*/", "", body, flags=re.S)
    found = []
    for text in body.split(";"):
        words = " ".join(line for line in text.split("\n") if not line.strip().startswith((".loc", ".file")))
        # Labels, and the braces around inline assembly.
        words = re.sub(r"^(?:\$?\w+:|[{}]|\s)+", "", words)
        words = _PREDICATE.sub("", words.strip())
        if words and not words.startswith("."):
            found.append(" ".join(words.split()))
    return found


def _kind(opcode: str, operands: Sequence[str]) -> tuple[str, int] | None:
    """("read" or "write", the operand that is the address) of an access to global memory; None for anything else."""
    if opcode.startswith("cp.async.bulk"):
        into_global = ".global.shared" in opcode
        return ("write", 0) if into_global else ("read", 1)
    if opcode.startswith("cp.async") and len(operands) < 2:
        return None  # commit and wait
    if opcode.startswith(("atom.", "atom")) and ".shared" not in opcode:
        return "write", 1
    if any(space in opcode for space in _OF_SHARED) and not opcode.startswith("cp."):
        return None
    for table, kind in ((_READS, "read"), (_WRITES, "write")):
        for name, place in table.items():
            if opcode == name or opcode.startswith(name + "."):
                return kind, place
    return None


def accesses(ptx: str, parameters: Mapping[int, str], tables_of: frozenset[str] = frozenset()) -> Accesses:
    """Follow the accesses of a kernel.

    parameters: the names of the parameters that are addresses, by position; tables_of: those of them that point to
    integers of 64 bits, which may be addresses.
    """
    origins: dict[str, set[str]] = {}
    flows: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
    loads: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
    found: list[_Access] = []
    early = _WAIT in ptx
    for text in _instructions(ptx):
        opcode, _, rest = text.partition(" ")
        if opcode == _WAIT:
            early = False
            continue
        operands = [group.strip() for group in _GROUP.findall(rest) if group.strip()]
        registers = [tuple(_REGISTER.findall(operand)) for operand in operands]
        kind = _kind(opcode, operands)
        parameter = _PARAMETER.search(rest)
        if kind is not None:
            address = registers[kind[1]] if kind[1] < len(registers) else ()
            if opcode.startswith(("cp.async.bulk.tensor", "cp.reduce")):
                address = address[:1]  # the rest are coordinates
            found.append(_Access(text, kind[0], address, early))
            if kind[0] == "read" and opcode.startswith("ld") and "64" in opcode and operands:
                loads.append((registers[0], address))
            elif kind[0] == "read" and not opcode.startswith("ld"):
                loads.append((("shared",), address))
        elif parameter is not None and operands:
            name = parameters.get(int(parameter[1]))
            for register in registers[0]:
                origins.setdefault(register, set()).update({name} if name is not None else ())
        elif opcode.startswith("st.shared"):
            flows.append((("shared",), tuple(r for group in registers[1:] for r in group)))
        elif opcode.startswith("ld.shared"):
            flows.append((registers[0], ("shared",)))
        elif operands:
            flows.append((registers[0], tuple(r for group in registers[1:] for r in group)))
    _spread(origins, flows)
    tables: dict[str, set[str]] = {}
    for targets, address in loads:
        through = {f"{name}[]" for register in address for name in origins.get(register, ()) if name in tables_of}
        for target in targets:
            tables.setdefault(target, set()).update(through)
    _spread(tables, flows)
    return _collected(found, origins, tables)


def _spread(origins: dict[str, set[str]], flows: Iterable[tuple[tuple[str, ...], tuple[str, ...]]]) -> None:
    """What each register may come from, until nothing is added."""
    changed = True
    while changed:
        changed = False
        for targets, sources in flows:
            new = set().union(*(origins.get(source, set()) for source in sources))
            for target in targets:
                own = origins.setdefault(target, set())
                if not new <= own:
                    own |= new
                    changed = True


def _collected(found: Iterable[_Access], origins: Mapping[str, set[str]], tables: Mapping[str, set[str]]) -> Accesses:
    by_kind: dict[str, set[str]] = {"read": set(), "write": set()}
    early: set[str] = set()
    lost = []
    for access in found:
        names = set().union(*(origins.get(register, set()) for register in access.address))
        names = names or set().union(*(tables.get(register, set()) for register in access.address))
        if not names:
            lost.append(access.text)
        by_kind[access.kind] |= names
        if access.early:
            early |= names
    return Accesses(frozenset(by_kind["read"]), frozenset(by_kind["write"]), frozenset(early), tuple(lost))


def accesses_of(compiled: Any) -> Accesses:
    """The accesses of a compiled kernel (what `triton.compile` or a launch returns), by its parameters' names."""
    parameters: dict[int, str] = {}
    tables_of = set()
    position = 0
    for name, kind in _leaves(compiled.src.signature.items()):
        descriptor = _DESCRIPTOR.match(kind)
        if kind == "constexpr":
            continue
        if descriptor is not None or kind.startswith("*"):
            parameters[position] = name
        # Expert ids are numbers of 64 bits too.
        if kind == "*i64" and not name.endswith("ids"):
            tables_of.add(name)
        # After a descriptor come its sizes and strides.
        position += 1 if descriptor is None else 1 + 2 * len(descriptor[1].split(","))
    return accesses(compiled.asm["ptx"], parameters, frozenset(tables_of))


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
    problems = [f"an address cannot be followed: {text}" for text in found.lost]
    for what, names, allowed in (
        ("reads", found.reads, {*traits.reads, *traits.writes}),
        ("writes", found.writes, {*traits.writes}),
        ("touches before the wait", found.early, {*traits.weights}),
    ):
        problems += [f"{what} {name}, which is not declared so" for name in sorted(names - allowed)]
    problems += [f"writes {name}, which is declared constant" for name in sorted(found.writes & {*traits.weights})]
    return problems
