"""Machine code written by hand, for tests of what is read from it."""

from __future__ import annotations

from collections.abc import Sequence

from moe_compiler.runtime_kernels.accesses import Address
from moe_compiler.runtime_kernels.sass import Code, Parameter, instruction

# Pointers a, b, c, a table of addresses, and a tensor's descriptor, as an sm_90 kernel finds them in constant bank 0.
BASE = 0x210
NAMES = {
    0: Address("a"),
    1: Address("b"),
    2: Address("c"),
    3: Address("table", table=True),
    4: Address("tensor", descriptor=True),
}
PARAMETERS = tuple(Parameter(8 * n, 8) for n in range(4)) + (Parameter(0x40, 0x80),)
LOADS = {
    "a": "ULDC.64 UR4, c[0x0][0x210]",
    "b": "ULDC.64 UR6, c[0x0][0x218]",
    "c": "ULDC.64 UR8, c[0x0][0x220]",
    "table": "ULDC.64 UR10, c[0x0][0x228]",
}


def code(lines: Sequence[str], architecture: int = 90) -> Code:
    """A kernel of these instructions, at the addresses 0x0, 0x10, 0x20, ..."""
    found = tuple(instruction(16 * n, text) for n, text in enumerate(lines))
    return Code("kernel", architecture, found, PARAMETERS, BASE)
