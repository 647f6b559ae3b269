"""P10: does a Gluon kernel that calls triton's device functions keep its wait and its trigger, and does the audit see
them? Compiled for sm_90, so it needs no GPU.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_compiler.runtime_kernels.audit import audit


@gluon.jit
def _add_one(source, target, TILE: gl.constexpr, WAIT: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.program_id(0) * TILE + gl.arange(0, TILE, layout=layout)
    if WAIT:
        tl.extra.cuda.gdc_wait()
    values = gl.load(source + at)
    if WAIT:
        tl.extra.cuda.gdc_launch_dependents()
    gl.store(target + at, values + 1)


def row(what: str, wait: bool) -> dict[str, Any]:
    """One row: the audit of the kernel, compiled with the attribute."""
    from triton.experimental.gluon._runtime import GluonASTSource

    signature = {"source": "*i32", "target": "*i32", "TILE": "constexpr", "WAIT": "constexpr"}
    source = GluonASTSource(fn=_add_one, signature=signature, constexprs={"TILE": 128, "WAIT": wait})
    found = audit(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"launch_pdl": True}))
    return {
        "probe": "P10",
        "kernel": what,
        "waits": found.waits,
        "triggers": found.triggers,
        "reads": ", ".join(found.reads),
        "writes": ", ".join(found.writes),
        "audit": "; ".join(found.problems) or "passes",
    }


def rows() -> list[dict[str, Any]]:
    """The whole table."""
    return [row("a Gluon kernel that waits, reads, triggers, writes", True), row("the same without a wait", False)]
