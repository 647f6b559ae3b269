"""The compiled code of every device kernel meets the obligations of a launch with the PDL attribute; no GPU is needed.

The launches run in recording mode on CPU tensors, so what is compiled is what a GPU would be given: each kernel as it
is launched by default for Hopper (sm_90), and every third for Blackwell (sm_100), in every run of the suite; the others
and every variant of each (`variants`) for both in the slow tests.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="device code is compiled by triton")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.experimental import gluon  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from moe_compiler import runtime_kernels  # noqa: E402
from moe_compiler.runtime_kernels import audit as audit_module  # noqa: E402
from moe_compiler.runtime_kernels.audit import AuditResult, audit, audit_code, compile_offline  # noqa: E402
from moe_compiler.runtime_kernels.device import trigger, wait, write_table_kernel  # noqa: E402
from moe_compiler.runtime_kernels.launching import Start, recording  # noqa: E402
from moe_compiler.runtime_kernels.registry import kernel  # noqa: E402
from moe_compiler.runtime_kernels.tiles import TABLES  # noqa: E402
from moe_compiler.runtime_kernels.warp_roles import roles_of  # noqa: E402
from tests.fast_part import covering, one_in  # noqa: E402
from tests.runtime_kernels.machine_code import LOADS, NAMES, code  # noqa: E402
from tests.runtime_kernels.recorded import DEVICE_KERNELS, ROUTE, TOKENS, record  # noqa: E402
from tests.runtime_kernels.variants import Variant, fitted_tiles, variants  # noqa: E402

VARIANTS = tuple(variants())


def _audit(start: Start, arch: int = 90) -> AuditResult:
    return audit(compile_offline(start, arch))


# Without groups, groups that are no power of two, the largest router; each with bias and scale and without.
ROUTERS = [
    (128, {}),
    (60, {"groups": 5, "kept_groups": 2}),
    (512, {"score": "softmax", "order": "after", "clamp": True}),
]


def router_name(value: Any) -> str:
    return str(value[0]) if isinstance(value, tuple) else ("bias and scale" if value else "plain")


@pytest.mark.parametrize(("router", "operands"), covering(ROUTERS, [False, True], ids=router_name))
def test_every_router_waits_first(router: tuple[int, dict[str, Any]], operands: bool) -> None:
    experts, changes = router
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


def _must_be_sound(starts: list[Start], arch: int) -> None:
    for start in starts:
        compiled = compile_offline(start, arch)
        result = audit(compiled)
        assert result.ok, f"{result.kernel}: {result.problems}"
        assert result.attribute
        assert result.waits == roles_of(compiled)
        assert result.triggers >= 1  # one in each branch that ends the program
        assert result.reads and result.writes


# On Hopper always; on Blackwell every third.
EVERYWHERE = [(name, 90) for name in DEVICE_KERNELS]


@pytest.mark.parametrize(("name", "arch"), EVERYWHERE + one_in(3, [(name, 100) for name in DEVICE_KERNELS]))
def test_every_kernel_waits_first(name: str, arch: int) -> None:
    _must_be_sound(record(name, pdl=True), arch)


# Kernels with specialised warps are launched on Hopper alone: their tensor cores take instructions of its own.
ON_EACH = [(v, arch) for v in VARIANTS for arch in (90, 100) if arch == 90 or v.tile is None or v.tile.instead is None]


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "arch"), ON_EACH, ids=[f"{variant}-{arch}" for variant, arch in ON_EACH])
def test_every_variant_waits_first(variant: Variant, arch: int) -> None:
    _must_be_sound(variant.starts(), arch)


def test_no_kernel_and_no_tile_is_forgotten() -> None:
    """Every function that triton compiles for a launch is among the variants, and every tile of the tables."""
    modules = [
        importlib.import_module(found.name)
        for found in pkgutil.walk_packages(runtime_kernels.__path__, f"{runtime_kernels.__name__}.")
        if found.name.endswith((".kernel", ".specialised"))
    ]
    there = {
        name
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, triton.JITFunction) and name.endswith("_kernel")
    }
    assert len(modules) >= 8 and len(there) >= 14
    audited = Counter(start.kernel.__name__ for variant in VARIANTS for start in variant.starts())
    assert there == {*audited}
    assert {variant.kernel for variant in VARIANTS} == {*DEVICE_KERNELS}
    for name, table in TABLES.items():
        tiles = {*(tile for _, tile in table.few), table.many, *(tile for _, tile in table.single)}
        tiles |= {tile for _, tile in table.hopper}
        mine = [variant for variant in VARIANTS if variant.kernel == name and variant.tile is not None]
        assert tiles == {variant.tile for variant in mine if variant.epilogue != "fitted"}
        assert len(fitted_tiles(name)) == len([variant for variant in mine if variant.epilogue == "fitted"])
    # A step of 64 and one of 32 for each tile with weights on the copy engine, and narrow ones of all but the router.
    assert all(len(fitted_tiles(name)) >= 3 for name in TABLES if name != "router_logits")


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
def _wait_in_roles_kernel(source, other, target, steps, PDL: tl.constexpr):
    acc = tl.zeros((64, 64), tl.float32)
    for step in tl.range(0, steps, warp_specialize=True):
        wait(PDL)
        acc = tl.dot(source.load([0, step * 64]), other.load([0, step * 64]).T, acc)
    target.store([0, 0], acc.to(tl.bfloat16))


@triton.jit
def _wait_sometimes_kernel(source, target, number, PDL: tl.constexpr):
    at = tl.arange(0, 128)
    if number > 3:
        wait(PDL)
    tl.store(target + at, tl.load(source + at) + 1.0)


@triton.jit
def _end_without_wait_kernel(source, target, number, PDL: tl.constexpr):
    at = tl.arange(0, 128)
    if tl.program_id(0) < number:
        wait(PDL)
        tl.store(target + at, tl.load(source + at) + 1.0)


@triton.jit
def _prefetch_kernel(source, target, PDL: tl.constexpr):
    at = tl.arange(0, 128)
    fetch: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(fetch, "=r,l", [source + at], dtype=tl.int32, is_pure=False, pack=1)
    wait(PDL)
    tl.store(target + at, tl.load(source + at) + 1.0)


@triton.jit
def _non_coherent_kernel(source, target, PDL: tl.constexpr):
    at = tl.arange(0, 128)
    wait(PDL)
    load: tl.constexpr = "ld.global.nc.b32 $0, [$1];"
    value = tl.inline_asm_elementwise(load, "=r,l", [source + at], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(target + at, value)


@triton.jit
def _tiles_kernel(source, target, sums, PDL: tl.constexpr):
    wait(PDL)
    tile = source.load([0, 0])
    target.store([0, 64], tile)
    sums.atomic_add([0, 0], tile)


@triton.jit
def _early_trigger_kernel(source, target, PDL: tl.constexpr):
    trigger(PDL)
    wait(PDL)
    at = tl.arange(0, 128)
    tl.store(target + at, tl.load(source + at) + 1.0)


def _start(kernel: Any, operands: int, dtype: torch.dtype = torch.float32, stages: int = 3) -> Start:
    tensors = [torch.zeros(32768, dtype=dtype) for _ in range(operands - 1)] + [torch.zeros(4096)]
    return Start(kernel, 1, tuple(tensors), (), {}, True, 4, stages)


def _tiles(kernel: Any, numbers: tuple[int, ...] = (), dtype: torch.dtype = torch.bfloat16) -> Start:
    """A start on three descriptors of tiles [64, 64]."""
    operand = TensorDescriptor(torch.zeros(64, 512, dtype=dtype), [64, 512], [512, 1], [64, 64])
    return Start(kernel, 1, (operand,) * 3, numbers, {}, True, 4, 2)


def test_a_kernel_without_a_wait_is_found() -> None:
    result = _audit(_start(_no_wait_kernel, 2))
    assert result.problems == ("launched with the PDL attribute but never waits",)
    assert len(result.before_wait) == 2


def test_a_load_before_the_wait_is_found() -> None:
    result = _audit(_start(_late_wait_kernel, 2))
    assert len(result.problems) == 1
    assert "before the wait: LDG" in result.problems[0]


@pytest.mark.parametrize("stages", [2, 3])
def test_a_wait_in_a_pipelined_loop_is_found(stages: int) -> None:
    """Triton 3.4 to 3.7 load the first tiles of the pipeline above the wait, without a word."""
    result = _audit(_start(_wait_in_loop_kernel, 3, torch.bfloat16, stages))
    assert f"{result.waits} waits, expected one" in result.problems  # the loop is unrolled
    if not result.before_wait:
        pytest.skip(f"triton {triton.__version__} pipelines no loop with a wait in it")
    assert result.before_wait[0].startswith("LDGSTS")
    assert any("accessed before the wait: LDGSTS" in problem for problem in result.problems)


def test_a_wait_that_a_warp_specialised_loop_loses_is_found() -> None:
    """Triton 3.5 to 3.9 drop it with 4 warps, without a word: it is in the first representation, not in the code."""
    compiled = compile_offline(_tiles(_wait_in_roles_kernel, (8,)))
    assert "wait" in compiled.asm["ttir"]
    result = audit(compiled)
    if result.waits:
        assert not result.ok  # with no step nothing waits
        pytest.skip(f"triton {triton.__version__} keeps the wait of a warp-specialised loop")
    assert result.problems[0] == "launched with the PDL attribute but never waits"
    assert any("UTMALDG" in text for text in result.before_wait)


# The beginning of what triton 3.6 makes of the pipelined loop with two stages; the loop itself is left out.
PIPELINED = [
    *(LOADS["a"], LOADS["b"], LOADS["c"], "IMAD.WIDE R10, R9, 0x2, UR4", "IMAD.WIDE R12, R9, 0x2, UR6"),
    *("LDGSTS.E.BYPASS.128 [R4], desc[UR12][R10.64]", "LDGSTS.E.BYPASS.128 [R4+0x4000], desc[UR12][R12.64]"),
    *("LDGDEPBAR", "ACQBULK", "DEPBAR.LE SB0, 0x0", "BAR.SYNC.DEFER_BLOCKING 0x0"),
    *("HGMMA.64x64x16.F32.BF16 R24, gdesc[UR16], RZ, !UPT, gsb0", "WARPGROUP.DEPBAR.LE gsb0, 0x0"),
    *("IMAD.WIDE R2, R0, 0x4, UR8", "STG.E.128 desc[UR12][R2.64], R24", "EXIT"),
]


def test_copies_that_a_compiler_moved_above_the_wait_are_found() -> None:
    result = audit_code(code(PIPELINED), NAMES, True)
    assert result.problems == (f"global memory is accessed before the wait: {PIPELINED[5]}",)
    assert result.before_wait == tuple(PIPELINED[5:7])
    wait_first = [PIPELINED[8], *PIPELINED[:8], *PIPELINED[9:]]
    assert audit_code(code(wait_first), NAMES, True).ok


def _numbered(kernel: Any) -> Start:
    return Start(kernel, 1, (torch.zeros(128), torch.zeros(128)), (4,), {}, True, 4, 3)


def test_the_wait_must_dominate_accesses_and_ends() -> None:
    sometimes = _audit(_numbered(_wait_sometimes_kernel))
    assert len(sometimes.problems) == 2 and sometimes.waits == 1
    assert "accessed before the wait: LDG" in sometimes.problems[0]
    assert "may end without waiting" in sometimes.problems[1]
    # Its accesses are all behind the wait, but a grid that ends without one does not pass on what it depends on.
    (problem,) = _audit(_numbered(_end_without_wait_kernel)).problems
    assert "may end without waiting" in problem


def test_a_prefetch_before_the_wait_is_no_access() -> None:
    result = _audit(_start(_prefetch_kernel, 2))
    assert result.ok and result.before_wait == ()


def test_a_load_that_bypasses_coherence_is_found() -> None:
    (problem,) = _audit(_start(_non_coherent_kernel, 2)).problems
    assert problem.startswith("a load bypasses coherence: LDG.E.CONSTANT")


@pytest.mark.parametrize("arch", [90, 100])
def test_tiles_are_read_and_written_through_their_descriptors(arch: int) -> None:
    result = _audit(_tiles(_tiles_kernel, dtype=torch.float32), arch)
    assert result.ok
    assert (result.reads, result.writes) == (("source", "sums"), ("sums", "target"))


@gluon.jit
def _gluon_kernel(source, target, PDL: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.arange(0, 128, layout=layout)
    wait(PDL)
    value = gl.load(source + at)
    trigger(PDL)
    gl.store(target + at, value + 1.0)


@pytest.mark.parametrize("arch", [90, 100])
def test_a_gluon_kernel_keeps_its_wait_and_its_trigger(arch: int) -> None:
    """Gluon has no such functions of its own; those of triton's language go through it."""
    source = GluonASTSource(
        _gluon_kernel, {"source": "*fp32", "target": "*fp32", "PDL": "constexpr"}, constexprs={"PDL": True}
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 4, "launch_pdl": True})
    result = audit(compiled)
    assert result.ok and (result.waits, result.triggers) == (1, 1)
    assert (result.reads, result.writes) == (("source",), ("target",))


def test_a_trigger_before_the_wait_is_found() -> None:
    assert _audit(_start(_early_trigger_kernel, 2)).problems == ("the trigger comes before the wait",)


def test_code_with_other_faults() -> None:
    good = [
        LOADS["a"],
        "IMAD.WIDE R2, R0, 0x4, UR4",
        "ACQBULK",
        "LDG.E R6, desc[UR12][R2.64]",
        "PREEXIT",
        "STG.E desc[UR12][R2.64], R6",
        "EXIT",
    ]

    def problems(lines: list[str], attribute: bool = True) -> tuple[str, ...]:
        return audit_code(code(lines), NAMES, attribute).problems

    def changed(at: int, *lines: str) -> list[str]:
        return [*good[:at], *lines, *good[at + 1 :]]

    assert problems(good) == ()
    assert problems(good, False) == ("waits, but is launched without the attribute",)
    assert problems(changed(2, "NOP"))[0] == "launched with the PDL attribute but never waits"
    assert problems(changed(2, "ACQBULK", "ACQBULK")) == ("2 waits, expected one",)
    assert "the wait is predicated: @P0 ACQBULK" in problems(changed(2, "@P0 ACQBULK"))
    assert problems(changed(2, "@P0 EXIT", "ACQBULK")) == ("a thread may end without waiting: @P0 EXIT",)
    assert problems(changed(2, "PREEXIT", "ACQBULK")) == ("the trigger comes before the wait",)
    assert problems(changed(2, "WHATEVER R0", "ACQBULK"))[0] == "WHATEVER R0 is no instruction that is known"
    bypass = "LDG.E.CONSTANT R6, desc[UR12][R2.64]"
    assert problems(changed(3, bypass)) == (f"a load bypasses coherence: {bypass}",)
    # A way around the wait.
    assert problems(["@P0 BRA 0x50", *good]) == (
        f"global memory is accessed before the wait: {good[5]}",
        "a thread may end without waiting: EXIT",
        "the trigger comes before the wait",
    )
    # A way that cannot be followed: ahead of the wait it may lead anywhere.
    jump = "BRX R4 -0x10 goes to an address that the code does not tell"
    assert problems(changed(4, "BRX R4 -0x10")) == (jump,)
    assert problems(["@P0 BRX R4 -0x10", *good])[0] == f"@P0 {jump}"
    assert len(problems(["@P0 BRX R4 -0x10", *good])) > 1


def test_code_that_cannot_be_read_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compile_offline(_start(_late_wait_kernel, 2))
    monkeypatch.setitem(compiled.asm, "cubin", b"no binary")
    (problem,) = audit(compiled).problems
    assert problem.startswith("the code cannot be read: ")


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


def test_a_remembered_audit_is_of_all_the_code_that_decides_it() -> None:
    """What the parts of an audit import is a part, too, but for what launches and declarations look like."""
    folder, imported = Path(audit_module.__file__).parent, set()
    for name in audit_module._PARTS:
        for node in ast.walk(ast.parse((folder / f"{name}.py").read_text())):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if module.startswith(f"{runtime_kernels.__name__}."):
                imported.add(module.removeprefix(f"{runtime_kernels.__name__}."))
    assert "origins" in imported
    assert imported - {"launching", "registry"} <= {*audit_module._PARTS}
