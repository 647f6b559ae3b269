"""The roles of a kernel's warps, read from its machine code.

A kernel with specialised warps asks each thread for its number before anything else. The first warps go on with the
kernel; the others sleep until they are told a role, and end when they are told so. Seen from the code alone one of
those might end without ever having had a role. What can be proved is what the first warps do, and as every block has
them, that suffices where something must be done by some thread of each block.
"""

from __future__ import annotations

import re
from typing import Any

from moe_compiler.runtime_kernels.sass import Code, Place
from moe_compiler.runtime_kernels.sass_effects import UnknownInstructionError, effect

__all__ = ["parting", "roles_of"]

_PARTITION = re.compile(r"^\s*partition\d+\(", re.MULTILINE)
_REGISTER = re.compile(r"\bU?R\d+\b|\bU?P\d\b")
# What may stand between a thread's number and the predicate that asks for it.
_STEPS = frozenset(["SHF", "USHF", "R2UR", "MOV", "UMOV", "LOP3", "ULOP3", "ISETP", "UISETP", "PLOP3", "UPLOP3"])


def roles_of(compiled: Any) -> int:
    """How many roles the warps of a compiled kernel have: 1 when they are not specialised."""
    return 1 + len(_PARTITION.findall(compiled.asm.get("ttgir", "")))


def parting(code: Code) -> tuple[int, int] | None:
    """Where the threads go on behind the first branch, by index: (those that do not take it, those that do).

    None unless the branch depends on nothing but the thread's number in its block.
    """
    first = next((n for n, found in enumerate(code.instructions) if found.kind == "BRA"), None)
    if first is None or not code.instructions[first].conditional:
        return None
    asked = set(_REGISTER.findall(code.instructions[first].guard))
    for found in reversed(code.instructions[:first]):
        try:
            does = effect(found)
        except UnknownInstructionError:
            return None
        written = {flow.target for flow in does.flows} | does.predicates
        if not written & asked:
            continue
        if found.conditional:
            return None
        asked -= written
        if found.kind in ("S2R", "S2UR") and found.operands[1] == "SR_TID.X":
            continue
        if found.kind not in _STEPS:
            return None
        # A test writes two predicates, the others one register.
        sources = found.operands[2 if found.kind.endswith(("SETP", "PLOP3")) else 1 :]
        asked |= {name for operand in sources for name in _REGISTER.findall(operand)}
    if asked:
        return None
    onward = [place.index for place in code.after(Place(first))]
    return (first + 1, next(n for n in onward if n != first + 1)) if len(set(onward)) == 2 else None
