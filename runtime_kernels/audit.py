"""What the compiled code of a kernel does about programmatic dependent launch, read from its machine code.

The source of a kernel is no proof: the compiler moves loads above a wait that stands in a pipelined loop, and drops one
that stands in a warp-specialised loop. So the proof obligations of a launch with the PDL attribute are checked in SASS:

    one wait (ACQBULK), unpredicated; where warps are specialised, one in each of their roles
    it dominates every access to global memory, every trigger (PREEXIT) and every end: on no way from the entry does a
        thread come to one of these without a wait, whatever the branches do. Of specialised warps only the first must
        not end without one: a block then never ends before what it depends on, and that is what others rely on
    no loads that bypass coherence (LDG.CONSTANT) anywhere
    the launch attribute if and only if there is a wait
    every access to global memory leads back to a parameter, and every instruction is known (see `accesses`)

The rules of programmatic launch would allow reads of constants, and of what the grand-producer wrote, before the wait
(`pdl_rules`, R6). No kernel makes use of that, so the audit allows none: a compiler that moves a load above the wait is
then caught whatever it loads. Prefetches into the cache are no accesses, since they return no data.

Nothing here needs a GPU: `compile_offline` compiles a recorded start for any architecture, and the disassembler is the
one that ships with triton. On a GPU every kernel that is about to be launched with the attribute for the first time is
checked too (`audited`), once for each compilation.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime.cache import get_cache_manager

from moe_compiler.runtime_kernels.accesses import Address, accesses, addresses
from moe_compiler.runtime_kernels.launching import DESCRIPTORS, Start
from moe_compiler.runtime_kernels.sass import Code, Instruction, UnknownFlowError, disassemble
from moe_compiler.runtime_kernels.sass_effects import UnknownInstructionError, effect
from moe_compiler.runtime_kernels.warp_roles import parting, roles_of

WAIT = "ACQBULK"
TRIGGER = "PREEXIT"
# After these a thread does nothing more.
END = frozenset(["EXIT", "KILL"])

_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}


# What an audit demands may change with these files.
_PARTS = ("audit", "accesses", "origins", "sass", "sass_effects", "warp_roles")
_SOURCE = hashlib.sha256(b"".join(Path(__file__).with_name(f"{name}.py").read_bytes() for name in _PARTS)).hexdigest()[
    :12
]
_audited: dict[str, AuditResult] = {}


@dataclass(frozen=True)
class AuditResult:
    """What was found in a kernel's code. `problems` is empty when every obligation is met.

    waits, triggers   how many of each; attribute: whether it is launched with the PDL attribute
    before_wait       the global accesses that a thread may come to without waiting (all of them when there is no wait)
    reads, writes     the parameters that it reads and writes through, as `accesses` finds them
    """

    kernel: str
    attribute: bool
    waits: int
    triggers: int
    before_wait: tuple[str, ...]
    problems: tuple[str, ...]
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems


def audit(compiled: Any) -> AuditResult:
    """Check the code of a compiled kernel (what `triton.compile` or a launch returns)."""
    attribute = bool(getattr(compiled.metadata, "launch_pdl", False))
    try:
        code = disassemble(compiled.asm["cubin"])
    except (ValueError, subprocess.CalledProcessError, OSError) as error:
        problem = f"the code cannot be read: {error}"
        return AuditResult(compiled.metadata.name, attribute, 0, 0, (), (problem,))
    return audit_code(code, addresses(compiled.src.signature), attribute, roles_of(compiled))


def audited(compiled: Any) -> AuditResult:
    """`audit`, remembered in the process and beside the compiled kernel in triton's cache."""
    known = _audited.get(compiled.hash)
    if known is None:
        cache, name = get_cache_manager(compiled.hash), f"moepdl_audit_{_SOURCE}.json"
        path = cache.get_file(name)
        if path is not None:
            record: dict[str, Any] = json.loads(Path(path).read_text())
            lists = {key: tuple(record[key]) for key in ("before_wait", "problems", "reads", "writes")}
            known = AuditResult(**{**record, **lists})
        else:
            known = audit(compiled)
            cache.put(json.dumps(asdict(known)), name, binary=False)
        _audited[compiled.hash] = known
    return known


def audit_code(code: Code, known: Mapping[int, Address], attribute: bool, roles: int = 1) -> AuditResult:
    """Check machine code for the obligations of the module's docstring.

    known: its parameters that are addresses; roles: those of its warps, 1 where they are not specialised.
    """
    waits = [n for n, found in enumerate(code.instructions) if found.kind == WAIT]
    triggers = [n for n, found in enumerate(code.instructions) if found.kind == TRIGGER]
    problems = []
    if attribute != bool(waits):
        problem = "launched with the PDL attribute but never waits"
        problems.append(problem if attribute else "waits, but is launched without the attribute")
    if len(waits) > roles:
        problems.append(f"{len(waits)} waits, expected one{'' if roles == 1 else f' in each of {roles} roles'}")
    if sometimes := [str(code.instructions[n]) for n in waits if code.instructions[n].conditional]:
        problems.append(f"the wait is predicated: {sometimes[0]}")
    found = accesses(code, known)
    problems += found.lost
    sure = [n for n in waits if not code.instructions[n].conditional]
    unwaited = _without(code, sure)
    before = tuple(str(code.instructions[n]) for n in unwaited if _touches_memory(code.instructions[n]))
    if waits:
        if before:
            problems.append(f"global memory is accessed before the wait: {before[0]}")
        ends = _ends(code, unwaited)
        if ends and roles > 1 and (parts := parting(code)) is not None:
            ends = min((_ends(code, _without(code, sure, start)) for start in parts), key=len)
        if ends:
            problems.append(f"a thread may end without waiting: {ends[0]}")
    if any(code.instructions[n].kind == TRIGGER for n in unwaited):
        problems.append("the trigger comes before the wait")
    if attribute or waits:
        loads = (i for i in code.instructions if i.kind == "LDG" and "CONSTANT" in i.modifiers)
        problems += [f"a load bypasses coherence: {load}" for load in itertools.islice(loads, 1)]
    reads, writes = tuple(sorted(found.reads)), tuple(sorted(found.writes))
    return AuditResult(code.kernel, attribute, len(waits), len(triggers), before, tuple(problems), reads, writes)


def _ends(code: Code, reached: Sequence[int]) -> list[str]:
    return [str(code.instructions[n]) for n in reached if code.instructions[n].kind in END]


def _without(code: Code, waits: Sequence[int], start: int = 0) -> list[int]:
    """The instructions that a thread may come to from `start` without executing one of `waits`, in memory's order."""
    try:
        return sorted({place.index for place in code.reached(waits, start)})
    except UnknownFlowError:
        # `accesses` tells of it; everything counts as reached.
        return list(range(len(code.instructions)))


def _touches_memory(instruction: Instruction) -> bool:
    try:
        return effect(instruction).access is not None
    except UnknownInstructionError:
        return True


def compile_offline(start: Start, arch: int = 90) -> Any:
    """Compile a recorded start for compute capability `arch`. Operands count only by type and alignment."""
    source, options = source_of(start)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def source_of(start: Start) -> tuple[Any, dict[str, Any]]:
    """What triton compiles for a recorded start, and the options for it."""
    names = start.kernel.arg_names
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {**start.constants, "PDL": start.pdl}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, (name, operand) in enumerate(zip(names, start.operands, strict=False)):
        if operand is None:
            constants[name] = None
        elif isinstance(operand, DESCRIPTORS):
            layout = getattr(operand, "layout", None)
            box = f"{_NAMES[operand.base.dtype]}{list(operand.block_shape)}"
            signature[name] = f"tensordesc<{box}>" if layout is None else f"tensordesc<{box},{layout!r}>"
        else:
            signature[name] = f"*{_NAMES[operand.dtype]}"
            if operand.data_ptr() % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    for name in names[len(start.operands) : len(start.operands) + len(start.numbers)]:
        signature[name] = "i32"
    signature |= dict.fromkeys(constants, "constexpr")
    kind = GluonASTSource if isinstance(start.kernel, GluonJITFunction) else ASTSource
    places = {(names.index(name),): value for name, value in constants.items()}
    source = kind(start.kernel, {name: signature[name] for name in names}, places, attributes)
    options = {
        "num_warps": start.warps,
        "num_stages": start.stages,
        "maxnreg": start.registers,
        "launch_pdl": start.pdl,
    }
    return source, options
