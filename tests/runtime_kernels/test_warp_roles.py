"""Where a kernel's warps part into roles, and what an audit then asks of each role."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="device code is compiled by triton")

from moe_compiler.runtime_kernels.audit import audit, audit_code, compile_offline
from moe_compiler.runtime_kernels.tiles import TABLES
from moe_compiler.runtime_kernels.warp_roles import parting, roles_of
from tests.runtime_kernels.machine_code import LOADS, NAMES, code
from tests.runtime_kernels.recorded import operands, record, record_on

ASK = (
    "S2R R0, SR_TID.X",
    "ULDC.64 UR32, c[0x0][0x208]",
    "SHF.R.U32.HI R0, RZ, 0x5, R0",
    "R2UR UR58, R0",
    "UISETP.GE.U32.AND UP0, UPT, UR58, 0x4, UPT",
    "PLOP3.LUT P0, PT, PT, PT, UP0, 0x80, 0x0",
    "@P0 BRA 0xc0",
)
STORE = (LOADS["a"], "IMAD.WIDE R2, R0, 0x4, UR4", "STG.E desc[UR12][R2.64], R24")
FIRST = ("ACQBULK", *STORE, "EXIT")
OTHERS = ("BAR.SYNC.DEFER_BLOCKING 0x1", "@P1 EXIT", "ACQBULK", *STORE, "EXIT")
ROLES = (*ASK, *FIRST, *OTHERS)


def changed(old: str, new: str, lines: tuple[str, ...] = ROLES) -> list[str]:
    assert old in lines
    return [new if line == old else line for line in lines]


def test_each_role_waits_for_itself():
    assert parting(code(ROLES)) == (7, 12)
    assert audit_code(code(ROLES), NAMES, True, roles=2).ok


def test_without_roles_the_same_code_is_refused():
    found = audit_code(code(ROLES), NAMES, True)
    assert found.problems == ("2 waits, expected one", "a thread may end without waiting: @P1 EXIT")


def test_a_role_that_touches_memory_without_its_wait_is_found():
    lines = [*ASK, *FIRST, *(line for line in OTHERS if line != "ACQBULK")]
    (problem,) = audit_code(code(lines), NAMES, True, roles=2).problems
    assert problem == "global memory is accessed before the wait: STG.E desc[UR12][R2.64], R24"


def test_the_first_warps_must_wait():
    lines = [*ASK, "NOP", *FIRST[1:], *OTHERS]
    problems = audit_code(code(lines), NAMES, True, roles=2).problems
    assert any("may end without waiting" in problem for problem in problems)
    assert any("before the wait: STG" in problem for problem in problems)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (ASK[0], "S2R R0, SR_CTAID.X"),  # of another block, whose threads would all go one way
        (ASK[3], "ULDC UR58, c[0x0][0x210]"),  # of an argument
        (ASK[2], "LDG.E R0, desc[UR32][R2.64]"),  # of memory
        (ASK[2], "@P3 SHF.R.U32.HI R0, RZ, 0x5, R0"),  # of what was there before
        (ASK[1], "ULDC.64 UR58, c[0x0][0x208]"),  # the same: what comes later counts
    ],
)
def test_only_the_number_of_a_thread_parts_roles(old, new):
    found = parting(code(changed(old, new)))
    assert found == ((7, 12) if old == ASK[1] else None)


def test_a_loop_or_no_branch_at_all_parts_nothing():
    assert parting(code(FIRST)) is None
    assert parting(code(["BRA 0x0"])) is None


@pytest.mark.parametrize("name", [name for name, table in TABLES.items() if table.hopper])
def test_the_kernels_with_specialised_warps_have_three_roles_and_wait_in_each(name):
    _, tile = TABLES[name].hopper[-1]
    given = operands(hidden=256, inner=256)
    (start,) = record_on(given, name, True, given["x"].dtype, tile=tile)
    assert "specialised" in start.kernel.__name__
    compiled = compile_offline(start)
    assert roles_of(compiled) == 3
    found = audit(compiled)
    assert found.ok and found.waits == 3
    (plain,) = record(name, True, tile=tile.instead)
    assert roles_of(compile_offline(plain)) == 1
