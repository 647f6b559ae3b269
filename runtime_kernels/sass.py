"""The machine code of a kernel as values: its instructions, its parameters, and the ways through it.

Nothing is assumed about what cannot be read: an instruction whose next one is not known from the code alone (a jump
through a register, a return to an address that no call left behind) raises `UnknownFlowError`, and whoever asks about
the kernel must then take the worst for granted.

The disassembler is the one that ships with triton.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import triton

__all__ = ["Code", "Instruction", "Parameter", "Place", "UnknownFlowError", "disassemble", "parse"]

_INSTRUCTION = re.compile(r"^\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<text>[^;/]*?[^;/\s])\s*;")
# Some disassemblers add what the scheduler is told: "BRA 0x100 &req={1} ?trans5".
_ANNOTATION = re.compile(r"\s+[&?].*$")
_FUNCTION = re.compile(r"^\s*Function : (\S+)")
_ARCHITECTURE = re.compile(r"code for sm_(\d+)")
_PARAMETER = re.compile(r"Ordinal : 0x([0-9a-f]+)\s+Offset\s*: 0x([0-9a-f]+)\s+Size\s*: 0x([0-9a-f]+)")
# The halves of the word that follows the attribute: size and first byte of the parameters in constant bank 0.
_BANK = re.compile(r"EIATTR_PARAM_CBANK\n\s*Format:[^\n]*\n\s*Value:\s*0x[0-9a-f]+ 0x([0-9a-f]+)")
_TARGET = re.compile(r"^0x([0-9a-f]+)$")
_CONSTANT_MOVE = re.compile(r"^(?:MOV|IMAD\.MOV\.U32) R\d+, (?:RZ, RZ, )?0x([0-9a-f]+)$")
_PREDICATE = re.compile(r"^!?U?P[0-9T]$")
# Calls inside calls beyond this depth are taken for recursion.
_DEEPEST = 8


class UnknownFlowError(ValueError):
    """Where the code goes on after an instruction cannot be told; the message names the instruction."""


@dataclass(frozen=True)
class Instruction:
    """One instruction: its address, its guard ("@!P0" or ""), its opcode with modifiers, its operands."""

    address: int
    guard: str
    opcode: str
    operands: tuple[str, ...]

    @property
    def kind(self) -> str:
        """The opcode without modifiers: LDG of LDG.E.128."""
        return self.opcode.partition(".")[0]

    @property
    def modifiers(self) -> tuple[str, ...]:
        return tuple(self.opcode.split(".")[1:])

    @property
    def conditional(self) -> bool:
        """Whether some threads may pass it without executing it."""
        return self.guard not in ("", "@PT", "@UPT")

    def __str__(self) -> str:
        return " ".join(filter(None, (self.guard, self.opcode, ", ".join(self.operands))))


@dataclass(frozen=True)
class Parameter:
    """A kernel's parameter: where in constant bank 0 it lies, in bytes."""

    offset: int
    size: int


@dataclass(frozen=True)
class Place:
    """An instruction by its index, as a thread comes to it.

    calls      the calls that it is in: the address that each returns to, or None
    barriers   the convergence barriers that it has to pass, and where it goes on behind each
    """

    index: int
    calls: tuple[int | None, ...] = ()
    barriers: frozenset[tuple[str, int]] = frozenset()


@dataclass(frozen=True)
class Code:
    """A kernel's instructions in their order in memory, and its parameters in the order of their numbers.

    architecture: the compute capability it is made for (major * 10 + minor); base: where in constant bank 0 the
    parameters begin.
    """

    kernel: str
    architecture: int
    instructions: tuple[Instruction, ...]
    parameters: tuple[Parameter, ...] = ()
    base: int = 0

    @cached_property
    def _index(self) -> dict[int, int]:
        return {instruction.address: index for index, instruction in enumerate(self.instructions)}

    def _jump(self, instruction: Instruction) -> int:
        target = _TARGET.match(instruction.operands[-1]) if instruction.operands else None
        if target is None or int(target[1], 16) not in self._index:
            raise UnknownFlowError(f"{instruction} goes to an address that the code does not tell")
        return int(target[1], 16)

    def _returns_to(self, index: int) -> int | None:
        """The address after a call, if the code before it leaves just that address in a register."""
        if index + 1 == len(self.instructions):
            return None
        behind = self.instructions[index + 1].address
        for instruction in reversed(self.instructions[:index]):
            if instruction.kind in _JUMPS:
                break
            move = None if instruction.conditional else _CONSTANT_MOVE.match(str(instruction))
            if move is not None and int(move[1], 16) == behind:
                return behind
        return None

    def after(self, place: Place) -> tuple[Place, ...]:
        """Where a thread may be after the instruction at `place`. Raises UnknownFlowError."""
        instruction = self.instructions[place.index]
        kind, spared = instruction.kind, instruction.conditional

        def at(address: int, **changes: Any) -> tuple[Place, ...]:
            return (replace(place, index=self._index[address], **changes),)

        def on(**changes: Any) -> tuple[Place, ...]:
            if place.index + 1 == len(self.instructions):
                raise UnknownFlowError(f"{instruction} is the last instruction, and nothing ends there")
            return (replace(place, index=place.index + 1, **changes),)

        if kind in _ENDS:
            return on() if spared else ()
        if kind == "BRA":
            asks = any(_PREDICATE.match(operand) for operand in instruction.operands)
            # BRA.DIV and BRA.CONV ask whether the threads of the warp are together.
            asks = asks or bool({"DIV", "CONV"} & {*instruction.modifiers})
            return at(self._jump(instruction)) + (on() if spared or asks else ())
        if kind in ("BSSY", "BREAK", "BSYNC"):
            name = instruction.operands[0]
            others = frozenset(barrier for barrier in place.barriers if barrier[0] != name)
            if kind == "BSSY":
                return on(barriers=others | {(name, self._jump(instruction))}) + (on() if spared else ())
            if kind == "BREAK":
                return on(barriers=others) + (on() if spared else ())
            # A thread that has left the barrier before goes on.
            behind = [address for barrier, address in place.barriers if barrier == name]
            return on(barriers=others) + (at(behind[0], barriers=others) if behind else ())
        if kind == "WARPSYNC" and "COLLECTIVE" in instruction.modifiers:
            return at(self._jump(instruction)) + on()
        if kind == "CALL":
            if "REL" not in instruction.modifiers or len(place.calls) == _DEEPEST:
                raise UnknownFlowError(f"{instruction} cannot be followed")
            called = at(self._jump(instruction), calls=(*place.calls, self._returns_to(place.index)))
            return called + (on() if spared else ())
        if kind == "RET":
            address = place.calls[-1] if place.calls else None
            if address is None or address not in self._index:
                raise UnknownFlowError(f"{instruction} returns to an address that no call left behind")
            return at(address, calls=place.calls[:-1]) + (on() if spared else ())
        if kind in _JUMPS:
            raise UnknownFlowError(f"{instruction} goes to an address that the code does not tell")
        return on()

    def reached(self, past: Sequence[int] = (), start: int = 0) -> Iterator[Place]:
        """Every place that a thread may come to from `start` without executing an instruction at one of `past`.

        The instructions of `past` are not among them. start: an index, that of the entry or of a place outside of every
        call and barrier. Raises UnknownFlowError.
        """
        seen: set[Place] = set()
        rest = [Place(start)] if self.instructions else []
        while rest:
            place = rest.pop()
            if place in seen or place.index in past:
                continue
            seen.add(place)
            yield place
            rest.extend(self.after(place))


# After these no thread goes on, those that the guard spares excepted.
_ENDS = frozenset(["EXIT", "KILL"])
_JUMPS = frozenset(["BRA", "BRX", "BRXU", "JMP", "JMX", "JMXU", "CALL", "RET", "EXIT", "KILL", "BSYNC", "RPCMOV"])


def parse(text: str) -> Code:
    """The code in what `cuobjdump -elf -sass` prints of a file with one kernel. Raises ValueError for anything else."""
    kernels = {found[1] for line in text.splitlines() if (found := _FUNCTION.match(line))}
    if len(kernels) != 1:
        raise ValueError(f"expected the code of one kernel, found {sorted(kernels) or 'none'}")
    lines = [match for line in text.splitlines() if (match := _INSTRUCTION.match(line))]
    architecture, bank = _ARCHITECTURE.search(text), _BANK.search(text)
    by_number = {int(n, 16): Parameter(int(at, 16), int(size, 16)) for n, at, size in _PARAMETER.findall(text)}
    if bank is None and by_number:
        raise ValueError("the code does not tell where its parameters lie")
    return Code(
        kernel=kernels.pop(),
        architecture=int(architecture[1]) if architecture is not None else 0,
        instructions=tuple(instruction(int(match["address"], 16), match["text"]) for match in lines),
        parameters=tuple(by_number[n] for n in sorted(by_number)),
        base=int(bank[1], 16) & 0xFFFF if bank is not None else 0,
    )


def instruction(address: int, text: str) -> Instruction:
    """An instruction from its text: "@!P0 LDG.E R0, desc[UR4][R2.64]"."""
    text = _ANNOTATION.sub("", text)
    guard, _, rest = text.partition(" ") if text.startswith("@") else ("", "", text)
    opcode, _, operands = rest.strip().partition(" ")
    parts = tuple(part.strip() for part in operands.split(",") if part.strip())
    return Instruction(address, guard, opcode, parts)


def disassemble(cubin: bytes) -> Code:
    """The machine code in a compiled kernel's binary."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "-elf", "-sass", str(path)]
        return parse(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
