"""Whether the accesses of a reported race are ordered by one barrier of all threads of a block, in the machine code.

The hand-over of roles to specialised warps looks like this (sm_90, triton 3.6):

    the first warps                         every other warp
        STS.64 [roles], R2                      BAR.SYNC 0x1
        BAR.SYNC 0x1                            LDS.U8 R3, [roles + warp]
        ...                                     BAR.SYNC 0x1
        BAR.SYNC 0x1

A barrier that names no count of threads is passed when all of the block have come to it.
"""

from __future__ import annotations

import re

from moe_compiler.runtime_kernels.sass import Code

__all__ = ["handed_over"]

_PLACE = re.compile(r"(Read|Write) access at (\w+)\+0x([0-9a-f]+)")
_ENDS = frozenset(["BRA", "BRX", "EXIT", "RET", "CALL", "BSYNC", "WARPSYNC"])


def handed_over(code: Code, race: str) -> bool:
    """Whether all reads of a race stand right behind a barrier of all threads, and all writes right before it.

    race: racecheck's text, with the places of all accesses. False when it is about another kernel.
    """
    places = _PLACE.findall(race)
    barriers = {_barrier(code, int(at, 16), kind) for kind, name, at in places if name == code.kernel}
    kinds = {kind for kind, name, _ in places if name == code.kernel}
    return kinds == {"Read", "Write"} and len(barriers) == 1 and None not in barriers


def _barrier(code: Code, address: int, kind: str) -> str | None:
    """The number of the barrier behind a write, or in front of a read, with no other access to memory in between."""
    index = next((n for n, found in enumerate(code.instructions) if found.address == address), None)
    if index is None or code.instructions[index].kind != ("LDS" if kind == "Read" else "STS"):
        return None
    onward = code.instructions[index + 1 :] if kind == "Write" else reversed(code.instructions[:index])
    for found in onward:
        if found.kind == "BAR":
            whole = found.opcode.startswith("BAR.SYNC") and len(found.operands) == 1 and not found.conditional
            return found.operands[0] if whole else None
        if found.kind in _ENDS or found.kind.startswith(("LD", "ST", "ATOM", "RED", "SYNCS", "UTMA")):
            return None
    return None
