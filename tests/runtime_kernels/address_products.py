"""Products in a kernel's address arithmetic, read from the compiler's first form of it (TTIR, or TTGIR of Gluon).

An offset is a number of elements from a pointer. Where a row, a pair or an expert is multiplied with a length, 32 bits
are not enough for large problems: the product wraps around, and the kernel reads or writes elsewhere. Which factors
are lengths shows when the lengths are large: what is multiplied with a large number in 32 bits, on its way into an
offset, is a fault.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend

from moe_compiler.runtime_kernels.audit import source_of
from moe_compiler.runtime_kernels.launching import Start

_RESULT = re.compile(r"^\s*%(?P<name>[\w#]+)(?::\d+)? = (?P<op>[\w.]+)(?P<rest>.*)$")
_OPERAND = re.compile(r"%([\w]+(?:#\d+)?)")
_NUMBER = re.compile(r"(?:dense<)?(-?\d+)>? : (?:tensor<[\dx]*x?)?i32")
# What an offset's value comes through; a load, a reduction or a loop's argument is a value of its own.
_THROUGH = re.compile(
    r"arith\.(addi|subi|muli|shli|extsi|extui|select|minsi|maxsi|remsi|divsi)|"
    r"tt\.(splat|broadcast|expand_dims|reshape|trans|unsplat)|ttg\.convert_layout"
)


@dataclass(frozen=True)
class Operation:
    """One line of the text: its operation, the names of its operands, and the rest of the line."""

    op: str
    operands: tuple[str, ...]
    line: str

    @property
    def narrow(self) -> bool:
        """Whether it makes 32-bit integers."""
        return bool(re.search(r":\s*(tensor<[^>]*x)?i32", self.line))


def first_form(start: Start) -> str:
    """The text of a recorded start after the compiler's first stage, for Hopper: functions are inlined, no more."""
    source, options = source_of(start)
    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    told = backend.parse_options({**options, **source.parse_options()})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(told), backend.get_module_map()
    module = source.make_ir(target, told, functions, modules, context)
    stages: dict[str, Callable[..., object]] = {}
    backend.add_stages(stages, told, source.language)
    return str(next(iter(stages.values()))(module, {}))


def operations(text: str) -> dict[str, Operation]:
    """By the name of the (first) result, with the source location taken off."""
    found = {}
    for line in text.splitlines():
        line = line.partition(" loc(")[0]
        match = _RESULT.match(line)
        if match:
            found[match["name"]] = Operation(match["op"], tuple(_OPERAND.findall(match["rest"])), line.strip())
    return found


def constant(name: str, known: dict[str, Operation]) -> int | None:
    """The number that a value is everywhere, None where it is none or not known."""
    operation = known.get(name)
    if operation is None:
        return None
    if operation.op == "arith.constant":
        number = _NUMBER.search(operation.line)
        return int(number[1]) if number else None
    if operation.op in ("tt.splat", "tt.broadcast", "tt.expand_dims"):
        return constant(operation.operands[0], known)
    return None


def narrow_products(text: str, least: int) -> list[str]:
    """The 32-bit products in offsets of pointers: of two values, or of one and a number of at least `least`."""
    known = operations(text)
    offsets = [added.operands[1] for added in known.values() if added.op == "tt.addptr"]
    seen: set[str] = set()
    found: dict[str, None] = {}
    while offsets:
        name = offsets.pop()
        operation = known.get(name)
        if operation is None or name in seen:
            continue
        seen.add(name)
        if not _THROUGH.fullmatch(operation.op):
            continue
        offsets.extend(operation.operands)
        if operation.op not in ("arith.muli", "arith.shli") or not operation.narrow:
            continue
        numbers = [constant(factor, known) for factor in operation.operands]
        if operation.op == "arith.shli":
            numbers = [None if numbers[1] is None else 1 << numbers[1]]
        given = [abs(number) for number in numbers if number is not None]
        if not given or max(given) >= least:
            found[operation.line] = None
    return list(found)
