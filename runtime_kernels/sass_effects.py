"""What an instruction of the machine code does to registers and memory, as far as addresses are concerned.

Every opcode that can hold, move or use an address stands in a table below, with the registers that it writes. One that
stands in none raises `UnknownInstructionError`: nothing can then be said of the code. Where the width of a result is
not certain the larger one is taken, since a register that is thought to be overwritten can only make an address lost,
never be taken for another's.

Words of 32 bits are the unit: an address is a pair of registers, and each is followed by itself.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from moe_compiler.runtime_kernels.sass import Instruction

__all__ = ["Access", "Effect", "Flow", "UnknownInstructionError", "effect"]

SHARED, TENSOR = "shared", "tensor"


def _opcodes(*lines: str) -> frozenset[str]:
    return frozenset(opcode for line in lines for opcode in line.split())


# Results are made of the bits of the operands: they may be addresses when those are.
_CARRIES = _opcodes(
    "BMSK BMOV BREV FLO FSEL IABS IADD IADD3 IADD32I IDP IDP4A IMAD IMAD32I IMNMX IMUL IMUL32I ISCADD LEA LOP",
    "LOP3 LOP32I MOV MOV32I MOVM POPC PRMT R2UR REDUX CREDUX SEL SGXT SHF SHFL SHL SHR VABSDIFF VABSDIFF4 VIADD",
    "VIADDMNMX VIMNMX VIMNMX3 XMAD UBMSK UBREV UFLO UIABS UIADD3 UIMAD UIMNMX ULEA ULOP ULOP3 ULOP32I UMOV UPOPC",
    "UPRMT USEL USGXT USHF USHL USHR UVIADD UVIMNMX",
)
# Results are numbers: of floating point, of conversions, of special registers, of predicates, of tensor cores.
_NUMBERS = _opcodes(
    "FADD FADD32I FFMA FFMA32I FMNMX FMNMX3 FMUL FMUL32I FRND FSET FSWZADD MUFU FADD2 FFMA2 FMUL2 FHADD FHFMA",
    "HADD2 HADD2_32I HFMA2 HFMA2_32I HMNMX2 HMUL2 HMUL2_32I HSET2 VHMNMX DADD DFMA DMUL F2F F2FP F2I F2IP I2F",
    "I2FP I2I I2IP UF2F UF2FP UF2I UFADD UFFMA UFMNMX UFMUL UFRND UFSEL UFSET UI2F UI2FP UI2I UI2IP P2R UP2UR S2R",
    "S2UR CS2R CS2UR VOTE VOTEU MATCH ELECT B2R LEPC GETLMEMBASE SYNCS UTCATOMSWS HMMA IMMA BMMA DMMA QMMA OMMA",
    "HGMMA IGMMA QGMMA BGMMA",
)
# Results are predicates, or there are none that a register holds.
_NOTHING = _opcodes(
    "ISETP FSETP DSETP HSETP2 PSETP PLOP3 FCHK R2P UISETP UFSETP UPSETP UPLOP3 UR2UP R2B NOP ACQBULK PREEXIT",
    "ACQSHMINIT BAR UCGABAR_ARV UCGABAR_WAIT ARRIVES CGAERRBAR DEPBAR LDGDEPBAR ERRBAR FENCE MEMBAR NANOSLEEP",
    "PMTRIG WARPGROUP WARPGROUPSET WARPSYNC ENDCOLLECTIVE YIELD USETMAXREG SETLMEMBASE SETSMEMSIZE UVIRTCOUNT BPT",
    "BRA BRX BRXU BREAK BSSY BSYNC CALL EXIT JMP JMX JMXU KILL RET",
    # They fetch into caches or drop from them, and return no data.
    "CCTL CCTLL CCTLT UTMACCTL UTMACMDFLUSH UTMAPF UBLKPF",
    # Tensor cores that work from shared and tensor memory.
    "UTCBAR UTCHMMA UTCIMMA UTCQMMA UTCOMMA UTCMXQMMA UTCSHIFT",
)
_READS = frozenset(["LDG", "LD", "LDGMC"])
_WRITES = frozenset(["STG", "ST", "RED", "REDG"])
_ATOMICS = frozenset(["ATOM", "ATOMG"])
# Tiles between global and shared memory by a descriptor, whose address is the second bracket.
_TILES = {"UTMALDG": ("read",), "UTMASTG": ("write",), "UTMAREDG": ("read", "write")}
# Accesses whose address stands in no register that could be followed.
_LOST = {
    "TEX": "read",
    "TLD": "read",
    "TLD4": "read",
    "TXD": "read",
    "TMML": "read",
    "SULD": "read",
    "SUST": "write",
    "SURED": "write",
    "SUATOM": "write",
    "UBLKCP": "write",
    "UBLKRED": "write",
    "UTMASTAS": "write",
}
# What an address by a constant is added to keeps its distance from the beginning of the parameters.
_SUMS = frozenset(["IADD", "IADD3", "IADD32I", "UIADD3", "VIADD", "UVIADD"])
_MOVES = frozenset(["MOV", "UMOV", "R2UR", "SEL", "USEL", "SHFL"])

# Operands are taken from other threads of the warp.
_ACROSS = frozenset(["SHFL", "MOVM", "REDUX", "CREDUX"])

_REGISTER = re.compile(r"^[-~!|]*(?P<bank>U?R)(?P<number>\d+)\b")
_CONSTANT = re.compile(r"^[-~|]*c\[0x0\]\[0x([0-9a-f]+)\]")
_PREDICATE = re.compile(r"^!?U?P[0-9RT]$|^B\d+$")
_VOTE = re.compile(r"^VOTEU\.ANY (UP\d), (P\d)$")
# One predicate is put into a register while it is used for something else, and taken back: by its bit of them all.
_KEPT = re.compile(r"^P2R (R\d+), PR, RZ, 0x([0-9a-f]+)$")
_BACK = re.compile(r"^ISETP\.NE(?:\.U32)?\.AND (P\d), PT, (R\d+)(?:\.reuse)?, RZ, PT$")
_BITS = tuple(1 << n for n in range(7))
_CHANGES = re.compile(r"^U?P\d$")
_IMMEDIATE = re.compile(r"^-?0x[0-9a-f]+$")
_PAIR = re.compile(r"\b(U?R)(\d+)\.64\b")
_STACK = re.compile(r"^\[R1(?:\+(-?)0x([0-9a-f]+))?\]$")
_SIZE = re.compile(r"^[BUS]?(8|16|32|64|96|128|256)$")


class UnknownInstructionError(ValueError):
    """An opcode that is in no table here, or a form of one; the message names the instruction."""


@dataclass(frozen=True)
class Flow:
    """Where the content of a register or cell comes from.

    sources   registers, cells, and words of constant bank 0 by their offset
    step      what is added to the only source, or None where it is more than a sum with a constant
    loaded    it is what the instruction's access reads, too
    across    the sources may be registers of another thread of the warp, which need not have what this one has
    """

    target: str
    sources: tuple[str | int, ...] = ()
    step: int | None = None
    loaded: bool = False
    across: bool = False


@dataclass(frozen=True)
class Access:
    """An access to global memory: "read" or "write" or both, and the register pairs that its address is the sum of.

    tile: the address is that of a tensor's descriptor.
    """

    kinds: tuple[str, ...]
    pairs: tuple[tuple[str, str], ...]
    tile: bool = False


@dataclass(frozen=True)
class Effect:
    """What an instruction does where its guard lets it.

    predicates   those that it may change, "P0" or "UP0"
    any_of       (a predicate of the warp, a predicate): the first becomes whether any of its threads has the second
    same         (a register, a predicate) or the other way round: the first becomes what the second is. A register
                 stands for a predicate that holds if and only if it is not zero.
    """

    flows: tuple[Flow, ...] = ()
    access: Access | None = None
    predicates: frozenset[str] = frozenset()
    any_of: tuple[str, str] | None = None
    same: tuple[str, str] | None = None


def effect(instruction: Instruction) -> Effect:
    """What an instruction does. Raises UnknownInstructionError."""
    found, text = _effect(instruction), str(instruction)
    vote, kept, back = _VOTE.match(text), _KEPT.match(text), _BACK.match(text)
    any_of = (vote[1], vote[2]) if vote is not None else None
    same = (back[1], back[2]) if back is not None else None
    if kept is not None and (bit := int(kept[2], 16)) in _BITS:
        same = (kept[1], f"P{_BITS.index(bit)}")
    return Effect(found.flows, found.access, _changed(instruction), any_of, same)


def _changed(instruction: Instruction) -> frozenset[str]:
    """The predicates that an instruction may change: they stand ahead of a result in a register, or right behind it."""
    kind, operands = instruction.kind, instruction.operands
    if kind in ("P2R", "UP2UR"):
        return frozenset()
    ahead = list(itertools.takewhile(_PREDICATE.match, operands))
    behind = list(itertools.takewhile(_PREDICATE.match, operands[len(ahead) + 1 :]))
    # The first two of a test, whose further operands are predicates too; the first of a vote.
    found = [*ahead[: 1 if kind in ("VOTE", "VOTEU") else 2], *(behind if len(ahead) < 2 else ())]
    if "PR" in found or "UPR" in found:
        return frozenset(f"{bank}{n}" for bank in ("P", "UP") for n in range(8))
    return frozenset(o for o in found if _CHANGES.match(o))


def _effect(instruction: Instruction) -> Effect:
    kind = instruction.kind
    if kind in _NOTHING:
        return Effect()
    if kind in _CARRIES:
        return Effect(_carried(instruction))
    if kind in _NUMBERS:
        return Effect(tuple(Flow(target) for target in _result(instruction, _width(instruction))))
    if kind in _LOST:
        results = [t for operand in instruction.operands[:2] for t in _words(operand, 4)]
        return Effect(tuple(Flow(target) for target in results), Access((_LOST[kind],), ()))
    memory = [n for n, operand in enumerate(instruction.operands) if "[" in operand and not operand.startswith("c[")]
    if kind in ("LDC", "ULDC", "LDCU"):
        return Effect(_constants(instruction))
    if memory and kind in _READS | _ATOMICS:
        results = [t for operand in instruction.operands[: memory[0]] for t in _words(operand, _size(instruction))]
        access = Access(("read",) if kind in _READS else ("read", "write"), _pairs(instruction.operands[memory[0]]))
        return Effect(tuple(Flow(target, loaded=True) for target in results), access)
    if memory and kind in _WRITES:
        return Effect((), Access(("write",), _pairs(instruction.operands[memory[0]])))
    if len(memory) > 1 and kind == "LDGSTS":
        copied = Flow(SHARED, loaded=True)
        return Effect((copied,), Access(("read",), _pairs(instruction.operands[memory[1]])))
    if len(memory) > 1 and kind in _TILES:
        descriptor = _words(instruction.operands[memory[1]].strip("[]"), 2)
        pairs = ((descriptor[0], descriptor[1]),) if descriptor else ()
        return Effect((), Access(_TILES[kind], pairs, tile=True))
    found = _local(instruction, memory)
    if found is None:
        raise UnknownInstructionError(f"{instruction} is no instruction that is known")
    return Effect(found)


def _local(instruction: Instruction, memory: Sequence[int]) -> tuple[Flow, ...] | None:
    """The flows of an access to shared, tensor or stack memory; None for anything else."""
    kind, operands = instruction.kind, instruction.operands
    size = _size(instruction)
    stored = tuple(t for operand in operands[1:] for t in _words(operand, size)) if operands else ()
    if kind in ("LDS", "LDSM", "ATOMS") and memory:
        loaded = tuple(Flow(target, (SHARED,)) for target in _result(instruction, size))
        return (*loaded, Flow(SHARED, stored)) if kind == "ATOMS" else loaded
    if kind in ("STS", "STSM", "STAS", "UGETNEXTWORKID"):
        return (Flow(SHARED, stored),)
    if kind == "UTCCP":
        return (Flow(TENSOR, (SHARED,)),)
    if kind == "LDTM":
        return tuple(Flow(target, (TENSOR,)) for target in _result(instruction, size))
    if kind == "STTM":
        return (Flow(TENSOR, stored),)
    if kind in ("LDL", "STL") and memory:
        place = _STACK.match(operands[memory[0]])
        if place is None:
            return None
        first = int(place[2] or "0", 16) * (-1 if place[1] else 1)
        if kind == "LDL":
            return tuple(
                Flow(target, (_slot(first + 4 * n),), 0) for n, target in enumerate(_result(instruction, size))
            )
        return tuple(Flow(_slot(first + 4 * n), (source,), 0) for n, source in enumerate(_words(operands[-1], size)))
    return None


def _slot(offset: int) -> str:
    return f"stack{offset:+d}"


def _words(operand: str, count: int) -> tuple[str, ...]:
    """The registers of an operand that takes `count` of them; none for the zero register and what is no register."""
    found = _REGISTER.match(operand)
    if found is None:
        return ()
    return tuple(f"{found['bank']}{int(found['number']) + n}" for n in range(count))


def _sources(operand: str, count: int = 1) -> tuple[str | int, ...]:
    """Like `_words`, with the words of constant bank 0 by their offset."""
    constant = _CONSTANT.match(operand)
    if constant is not None:
        return tuple(int(constant[1], 16) + 4 * n for n in range(count))
    return _words(operand, count)


def _result(instruction: Instruction, width: int) -> tuple[str, ...]:
    """The registers that the first operand which is no predicate names."""
    for operand in instruction.operands:
        if not _PREDICATE.match(operand):
            return _words(operand, width)
    return ()


def _pairs(address: str) -> tuple[tuple[str, str], ...]:
    """The register pairs of an address: of desc[UR4][R2.64+0x10] R2 and R3."""
    inside = address[address.rindex("[") :]
    return tuple((f"{bank}{n}", f"{bank}{int(n) + 1}") for bank, n in _PAIR.findall(inside))


def _carried(instruction: Instruction) -> tuple[Flow, ...]:
    kind, modifiers = instruction.kind, instruction.modifiers
    operands = [operand for operand in instruction.operands if not _PREDICATE.match(operand)]
    wide = "WIDE" in modifiers
    if kind in ("IMAD", "UIMAD") and (wide or "HI" in modifiers) and len(operands) == 4:
        factors = (*_sources(operands[1]), *_sources(operands[2]))
        added = _sources(operands[3], 2)
        if not wide:
            return tuple(Flow(target, (*factors, *added)) for target in _words(operands[0], 1))
        by_word = [(*factors, *added[n : n + 1]) for n in range(2)]
        return tuple(Flow(t, from_) for t, from_ in zip(_words(operands[0], 2), by_word, strict=False))
    if wide:
        raise UnknownInstructionError(f"{instruction} is no form that is known")
    # Sums, moves and choices of 64 bits work word by word; the carry is no address.
    width = 2 if "64" in modifiers and kind not in ("SHF", "USHF", "SHFL", "POPC", "FLO") else 1
    step = _step(instruction, operands[1:])
    across, flows = kind in _ACROSS, []
    for n, target in enumerate(_words(operands[0], width) if operands else ()):
        sources = tuple(s for operand in operands[1:] for s in _sources(operand, width)[n : n + 1])
        flows.append(Flow(target, sources, step if n == 0 or step is None else 0, across=across))
    return tuple(flows)


def _step(instruction: Instruction, operands: Sequence[str]) -> int | None:
    """What a sum adds to its only register; 0 for a move, None for anything else."""
    registers = [operand for operand in operands if _sources(operand)]
    constants = [int(operand, 16) for operand in operands if _IMMEDIATE.match(operand)]
    kind, modifiers = instruction.kind, instruction.modifiers
    if kind in _MOVES:
        return 0
    if len(registers) != 1 or registers[0].startswith("-"):
        return None
    if kind in _SUMS:
        return sum(constants)
    # RZ * RZ + x
    return 0 if kind in ("IMAD", "UIMAD") and not constants and len(operands) == 3 and "WIDE" not in modifiers else None


def _constants(instruction: Instruction) -> tuple[Flow, ...]:
    """A load from a constant bank. What is not at a known place of bank 0 is a number."""
    targets = _result(instruction, _size(instruction))
    found = _sources(instruction.operands[-1], len(targets))
    return tuple(Flow(target, found[n : n + 1], 0) for n, target in enumerate(targets))


def _size(instruction: Instruction) -> int:
    """How many registers an access to memory fills or stores, at most."""
    kind, modifiers = instruction.kind, instruction.modifiers
    if kind in ("LDSM", "STSM", "MOVM"):
        return int(modifiers[-1]) if modifiers and modifiers[-1] in ("2", "4") else 1
    if kind in ("LDTM", "STTM"):
        times = [int(m[1:]) for m in modifiers if re.match(r"^x\d+$", m)]
        rows = {"dp128bit": 2, "dp256bit": 4}
        factor = max([rows[key] for m in modifiers for key in rows if key in m], default=1)
        return (times[0] if times else 1) * factor
    if kind == "UGETNEXTWORKID":
        return 1
    sizes = [int(found[1]) for m in modifiers if (found := _SIZE.match(m))]
    return max(max(sizes, default=32) // 32, 1)


def _width(instruction: Instruction) -> int:
    """How many registers a number fills, at most."""
    kind, modifiers = instruction.kind, instruction.modifiers
    if kind in ("HGMMA", "IGMMA", "QGMMA", "BGMMA"):
        shape = re.match(r"^64x(\d+)x\d+$", modifiers[0]) if modifiers else None
        if shape is None:
            raise UnknownInstructionError(f"{instruction} is no form that is known")
        return int(shape[1]) // (4 if modifiers[1:2] == ("F16",) else 2)
    if kind in ("HMMA", "IMMA", "BMMA", "DMMA", "QMMA", "OMMA"):
        return 2 if modifiers[1:2] == ("F16",) else 4
    if kind in ("CS2R", "CS2UR"):
        return 1 if "32" in modifiers else 2
    if kind in ("FADD2", "FFMA2", "FMUL2", "DADD", "DFMA", "DMUL", "SYNCS"):
        return 2
    if kind in ("F2F", "F2I", "UF2F", "UF2I", "I2I", "UI2I"):
        types = [m for m in modifiers if re.match(r"^[FSU](8|16|32|64)$", m)]
        return 2 if types[:1] in (["F64"], ["S64"], ["U64"]) else 1
    if kind in ("I2F", "UI2F"):
        return 2 if "F64" in modifiers else 1
    return 2 if kind == "LEPC" else 1
