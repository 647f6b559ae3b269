"""The compiled code of every device kernel meets the obligations of a launch with the PDL attribute; no GPU is needed.

The launches run in recording mode on CPU tensors, so what is compiled is what a GPU would be given.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="device code is compiled by triton")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from moe_compiler.runtime_kernels import audit as audit_module  # noqa: E402
from moe_compiler.runtime_kernels.audit import AuditResult, audit, audit_code, compile_offline  # noqa: E402
from moe_compiler.runtime_kernels.device import trigger, wait, write_table_kernel  # noqa: E402
from moe_compiler.runtime_kernels.launching import Start, recording  # noqa: E402
from moe_compiler.runtime_kernels.registry import kernel  # noqa: E402
from tests.runtime_kernels.recorded import DEVICE_KERNELS, ROUTE, TILED, TILES, TOKENS, record  # noqa: E402


def _audit(start: Start) -> AuditResult:
    return audit(compile_offline(start))


# Without groups, groups that are no power of two, the largest router; each with bias and scale and without.
ROUTERS = [
    (128, {}),
    (60, {"groups": 5, "kept_groups": 2}),
    (512, {"score": "softmax", "order": "after", "clamp": True}),
]


@pytest.mark.parametrize("operands", [False, True], ids=["plain", "bias and scale"])
@pytest.mark.parametrize(("experts", "changes"), ROUTERS, ids=["128", "60", "512"])
def test_every_router_waits_first(experts: int, changes: dict[str, Any], operands: bool) -> None:
    attrs = {
        **ROUTE,
        "groups": 1,
        "group_top": 1,
        "k": 8,
        "score_dtype": torch.float32,
        "dtype": torch.bfloat16,
        **changes,
    }
    numbers = torch.zeros(experts) if operands else None
    logits, ids = torch.zeros(TOKENS, experts), torch.zeros(TOKENS, 8, dtype=torch.int64)
    weights = torch.zeros(TOKENS, 8, dtype=torch.bfloat16)
    with recording() as starts:
        ins = {"logits": logits, "bias": numbers, "expert_scale": numbers}
        kernel("route").launch({"weights": weights, "ids": ids}, ins, attrs, pdl=True)
        ins = {"grad_weights": weights, "logits": logits, "ids": ids, "expert_scale": numbers}
        outs = {"grad_logits": logits} | ({"grad_expert_scale": torch.zeros(experts)} if operands else {})
        kernel("route_backward").launch(outs, ins, attrs, pdl=True)
    assert len(starts) == 2
    for start in starts:
        result = _audit(start)
        assert result.ok and result.waits == 1, f"{result.kernel}: {result.problems}"


@pytest.mark.parametrize("name", DEVICE_KERNELS)
def test_every_kernel_waits_first(name: str) -> None:
    for start in record(name, pdl=True):
        result = _audit(start)
        assert result.ok, f"{result.kernel}: {result.problems}"
        assert result.attribute
        assert result.waits == 1
        assert result.triggers >= 1  # one in each branch that ends the program
        assert result.reads and result.writes


@pytest.mark.slow
@pytest.mark.parametrize("listed", [False, True], ids=["packed", "list"])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("name", TILED)
def test_other_tiles_and_layouts_wait_first(name: str, tile: str, listed: bool) -> None:
    options = {"tile": TILES[tile]} if TILES[tile] else {}
    for start in record(name, pdl=True, listed=listed, **options):
        result = _audit(start)
        assert result.ok, f"{result.kernel}: {result.problems}"


@pytest.mark.slow
@pytest.mark.parametrize("name", DEVICE_KERNELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["float16", "float32"])
def test_other_dtypes_wait_first(name: str, dtype: torch.dtype) -> None:
    for start in record(name, pdl=True, dtype=dtype):
        assert _audit(start).ok


def test_without_pdl_there_is_neither_wait_nor_attribute() -> None:
    (start,) = record("combine", pdl=False)
    result = _audit(start)
    assert result.ok
    assert (result.attribute, result.waits, result.triggers) == (False, 0, 0)


def test_the_table_writer_compiles() -> None:
    """It takes its addresses as a tuple, which recorded starts do not carry."""
    signature = {"table": "*i64", "addresses": ("i64",) * 32, "COUNT": "constexpr"}
    source = ASTSource(write_table_kernel, signature, {"COUNT": 32})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
    result = audit(compiled)
    assert result.ok
    assert (result.attribute, result.waits) == (False, 0)


@triton.jit
def _no_wait_kernel(source, target, PDL: tl.constexpr):
    at = tl.arange(0, 128)
    tl.store(target + at, tl.load(source + at) + 1.0)


@triton.jit
def _late_wait_kernel(source, target, PDL: tl.constexpr):
    at = tl.arange(0, 128)
    value = tl.load(source + at)
    wait(PDL)
    trigger(PDL)
    tl.store(target + at, value + 1.0)


@triton.jit
def _wait_in_loop_kernel(source, other, target, PDL: tl.constexpr):
    row = tl.arange(0, 64)
    acc = tl.zeros((64, 64), tl.float32)
    at = row[:, None] * 64 + row[None, :]
    for step in range(8):
        wait(PDL)
        acc = tl.dot(tl.load(source + step * 4096 + at), tl.load(other + step * 4096 + at), acc)
    tl.store(target + at, acc)


@triton.jit
def _early_trigger_kernel(source, target, PDL: tl.constexpr):
    trigger(PDL)
    wait(PDL)
    at = tl.arange(0, 128)
    tl.store(target + at, tl.load(source + at) + 1.0)


def _start(kernel: Any, operands: int, dtype: torch.dtype = torch.float32, stages: int = 3) -> Start:
    tensors = [torch.zeros(32768, dtype=dtype) for _ in range(operands - 1)] + [torch.zeros(4096)]
    return Start(kernel, 1, tuple(tensors), (), {}, True, 4, stages)


def test_a_kernel_without_a_wait_is_found() -> None:
    result = _audit(_start(_no_wait_kernel, 2))
    assert result.problems == ("launched with the PDL attribute but never waits",)
    assert len(result.before_wait) == 2


def test_a_load_before_the_wait_is_found() -> None:
    result = _audit(_start(_late_wait_kernel, 2))
    assert len(result.problems) == 1
    assert "before the wait: LDG" in result.problems[0]


def test_a_wait_in_a_pipelined_loop_is_found() -> None:
    """Triton moves the loop's first loads above the wait, or repeats the wait: neither is what we allow."""
    assert not _audit(_start(_wait_in_loop_kernel, 3, torch.bfloat16)).ok


def test_a_trigger_before_the_wait_is_found() -> None:
    assert _audit(_start(_early_trigger_kernel, 2)).problems == ("the trigger comes before the wait",)


def test_code_with_other_faults() -> None:
    good = [
        "S2R R0, SR_TID.X",
        "ACQBULK",
        "LDG.E R2, desc[UR4][R2.64]",
        "PREEXIT",
        "STG.E desc[UR4][R2.64], R0",
        "EXIT",
    ]
    assert audit_code("good", good, True).ok
    assert "without the attribute" in audit_code("plain", good, False).problems[0]
    assert "2 waits" in audit_code("twice", [good[1], *good], True).problems[0]
    assert "predicated" in audit_code("sometimes", [good[0], "@P0 ACQBULK", *good[2:]], True).problems[0]
    assert "control flow" in audit_code("late", ["@P0 EXIT", *good], True).problems[0]
    bypass = [*good[:2], "LDG.E.CONSTANT R2, desc[UR4][R2.64]", *good[3:]]
    assert "coherence" in audit_code("bypass", bypass, True).problems[0]


def test_an_audit_is_remembered_beside_the_compiled_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled = compile_offline(_start(_late_wait_kernel, 2))
    made: list[Any] = []
    monkeypatch.setattr(audit_module, "audit", lambda handle: made.append(handle) or audit(handle))
    first = audit_module.audited(compiled)
    assert first == audit(compiled) and not first.ok
    audit_module._audited.clear()  # as a new process
    assert audit_module.audited(compiled) == first
    assert made == [compiled]
