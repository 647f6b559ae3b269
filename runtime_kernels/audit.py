"""What the compiled code of a kernel does about programmatic dependent launch, read from its machine code.

The source of a kernel is no proof: the compiler moves loads above a wait that stands in a pipelined loop, and drops one
that stands in a warp-specialised loop. So the proof obligations of a launch with the PDL attribute are checked in SASS:

    one wait (ACQBULK), in the entry block and unpredicated, so that every thread executes it before anything else
    no access to global memory before it
    the trigger (PREEXIT), if any, after it
    no loads that bypass coherence (LDG.CONSTANT) anywhere
    the launch attribute if and only if there is a wait
    every access to global memory leads back to a parameter (see `accesses`)

Nothing here needs a GPU: `compile_offline` compiles a recorded start for any architecture, and the disassembler is the
one that ships with triton. On a GPU every kernel that is about to be launched with the attribute for the first time is
checked too (`audited`), once for each compilation.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.cache import get_cache_manager
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_compiler.runtime_kernels.accesses import accesses_of
from moe_compiler.runtime_kernels.launching import Start

WAIT = "ACQBULK"
TRIGGER = "PREEXIT"
# Opcodes (up to the first dot) that read or write global memory. Prefetches are none: they return no data.
GLOBAL = frozenset(
    ["LD", "LDG", "LDGMC", "LDGSTS", "ST", "STG", "RED", "REDG", "ATOM", "ATOMG", "UTMALDG", "UTMASTG", "UTMAREDG"]
    + ["UBLKCP", "UBLKRED", "SULD", "SUST", "SURED", "SUATOM", "TEX", "TLD", "TLD4"]
)
# Opcodes after which a thread may be elsewhere than in the entry block.
BRANCH = frozenset(["BRA", "BRX", "BRXU", "JMP", "JMX", "JMXU", "EXIT", "RET", "CALL", "BREAK", "BSYNC", "KILL"])

_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?P<text>[^;/]*?[^;/\s])\s*;")
_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}


# What an audit demands may change with these files.
_SOURCE = hashlib.sha256(
    Path(__file__).read_bytes() + Path(__file__).with_name("accesses.py").read_bytes()
).hexdigest()[:12]
_audited: dict[str, AuditResult] = {}


@dataclass(frozen=True)
class AuditResult:
    """What was found in a kernel's code. `problems` is empty when every obligation is met.

    waits, triggers   how many of each; attribute: whether it is launched with the PDL attribute
    before_wait       the global accesses before the first wait (all of them when there is none)
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


def instructions(cubin: bytes) -> list[str]:
    """The instructions of a cubin in their order in memory, predicates included."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        text = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "-sass", str(path)], check=True, capture_output=True, text=True
        ).stdout
    return [found["text"] for line in text.splitlines() if (found := _INSTRUCTION.match(line))]


def opcode(instruction: str) -> str:
    """The opcode with its modifiers, without predicate and operands: "LDG.E.128"."""
    words = instruction.split()
    return words[1] if words[0].startswith("@") else words[0]


def audit(compiled: Any) -> AuditResult:
    """Check the code of a compiled kernel (what `triton.compile` or a launch returns)."""
    attribute = bool(getattr(compiled.metadata, "launch_pdl", False))
    result = audit_code(compiled.metadata.name, instructions(compiled.asm["cubin"]), attribute)
    found = accesses_of(compiled)
    lost = tuple(f"an address cannot be followed: {text}" for text in found.lost)
    return replace(
        result, problems=(*result.problems, *lost), reads=tuple(sorted(found.reads)), writes=tuple(sorted(found.writes))
    )


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


def audit_code(kernel: str, code: Sequence[str], attribute: bool) -> AuditResult:
    """Check a list of instructions; see the module's docstring for the obligations."""
    codes = [opcode(text) for text in code]
    kinds = [name.split(".")[0] for name in codes]
    waits = [i for i, kind in enumerate(kinds) if kind == WAIT]
    triggers = [i for i, kind in enumerate(kinds) if kind == TRIGGER]
    first = waits[0] if waits else len(code)
    before = tuple(code[i] for i in range(first) if kinds[i] in GLOBAL)
    problems = []
    if attribute != bool(waits):
        problem = "launched with the PDL attribute but never waits"
        problems.append(problem if attribute else "waits, but is launched without the attribute")
    if waits:
        if len(waits) > 1:
            problems.append(f"{len(waits)} waits, expected one")
        if code[first].startswith("@"):
            problems.append(f"the wait is predicated: {code[first]}")
        if left := [code[i] for i in range(first) if kinds[i] in BRANCH]:
            problems.append(f"control flow before the wait: {left[0]}")
        if before:
            problems.append(f"global memory is accessed before the wait: {before[0]}")
    if triggers and (not waits or triggers[0] < first):
        problems.append("the trigger comes before the wait")
    if attribute or waits:
        bypassing = [text for text, name in zip(code, codes, strict=True) if name[:3] == "LDG" and "CONSTANT" in name]
        if bypassing:
            problems.append(f"a load bypasses coherence: {bypassing[0]}")
    return AuditResult(kernel, attribute, len(waits), len(triggers), before, tuple(problems))


def compile_offline(start: Start, arch: int = 90) -> Any:
    """Compile a recorded start for compute capability `arch`. Operands count only by type and alignment."""
    names = start.kernel.arg_names
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {**start.constants, "PDL": start.pdl}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, (name, operand) in enumerate(zip(names, start.operands, strict=False)):
        if operand is None:
            constants[name] = None
        elif isinstance(operand, TensorDescriptor):
            signature[name] = f"tensordesc<{_NAMES[operand.base.dtype]}{list(operand.block_shape)}>"
        else:
            signature[name] = f"*{_NAMES[operand.dtype]}"
            if operand.data_ptr() % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    for name in names[len(start.operands) : len(start.operands) + len(start.numbers)]:
        signature[name] = "i32"
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(start.kernel, {name: signature[name] for name in names}, constants, attributes)
    options = {
        "num_warps": start.warps,
        "num_stages": start.stages,
        "maxnreg": start.registers,
        "launch_pdl": start.pdl,
    }
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
