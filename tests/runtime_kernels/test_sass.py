"""The ways through machine code: what a thread may come to, and what is refused because the code does not tell."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="the disassembler comes with triton")

from moe_compiler.runtime_kernels.sass import Parameter, UnknownFlowError, instruction, parse
from moe_compiler.runtime_kernels.sass_effects import UnknownInstructionError, effect
from tests.runtime_kernels.machine_code import code

LISTING = """
.nv.info.add_kernel
	<0x1>
	Attribute:	EIATTR_KPARAM_INFO
	Format:	EIFMT_SVAL
	Value:	Index : 0x0	Ordinal : 0x1	Offset  : 0x8	Size    : 0x4
		Pointee's logAlignment : 0x0	Space : 0x4	cbank : 0x1f	Parameter Space : CBANK
	<0x2>
	Attribute:	EIATTR_KPARAM_INFO
	Format:	EIFMT_SVAL
	Value:	Index : 0x0	Ordinal : 0x0	Offset  : 0x0	Size    : 0x8
		Pointee's logAlignment : 0x0	Space : 0x4	cbank : 0x1f	Parameter Space : CBANK
	<0x3>
	Attribute:	EIATTR_PARAM_CBANK
	Format:	EIFMT_SVAL
	Value:	0xd 0x0c0210

	code for sm_90a
		Function : add_kernel
	.headerflags	@"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;          /* 0x00000a00ff017b82 */
                                                                   /* 0x000fe200000008ff */
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;    /* 0x0 */
        /*0020*/                   EXIT ;    /* 0x0 */
"""


def test_a_listing_gives_instructions_and_parameters():
    found = parse(LISTING)
    assert (found.kernel, found.architecture, found.base) == ("add_kernel", 90, 0x210)
    assert found.parameters == (Parameter(0, 8), Parameter(8, 4))
    load = found.instructions[1]
    assert (load.address, load.guard, load.kind, load.modifiers) == (16, "@!P0", "LDG", ("E", "128"))
    assert load.operands == ("R4", "desc[UR4][R2.64]") and load.conditional
    assert str(load) == "@!P0 LDG.E.128 R4, desc[UR4][R2.64]"


def test_what_a_disassembler_says_about_scheduling_is_no_operand():
    assert instruction(0, "@!P0 BRA 0xde0      &req={1}   ?trans5").operands == ("0xde0",)
    assert instruction(0, "EXIT    ?WAIT12_END_GROUP").opcode == "EXIT"


@pytest.mark.parametrize("text", ["", LISTING + LISTING.replace("add_kernel", "other_kernel")], ids=["none", "two"])
def test_a_listing_of_no_kernel_or_several_is_refused(text):
    with pytest.raises(ValueError, match="expected the code of one kernel"):
        parse(text)


def test_a_listing_that_does_not_tell_where_parameters_lie_is_refused():
    with pytest.raises(ValueError, match="where its parameters lie"):
        parse(LISTING.replace("PARAM_CBANK", "OTHER"))


def reached(lines, past=()):
    return {place.index for place in code(lines).reached(past)}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["BRA 0x20", "NOP", "EXIT"], {0, 2}),
        (["@P0 BRA 0x20", "NOP", "EXIT"], {0, 1, 2}),
        (["BRA.U UP0, 0x20", "NOP", "EXIT"], {0, 1, 2}),
        (["BRA.DIV UR4, 0x20", "NOP", "EXIT"], {0, 1, 2}),
        (["EXIT", "NOP"], {0}),
        (["@P0 EXIT", "EXIT", "NOP"], {0, 1}),
        # Whoever synchronises goes on behind the barrier that he set up, not behind another one of that name.
        (["BSSY B0, 0x30", "BSYNC B0", "EXIT", "EXIT", "BSSY B0, 0x60", "NOP", "EXIT"], {0, 1, 2, 3}),
        # A call comes back.
        (["MOV R2, 0x20", "CALL.REL.NOINC 0x40", "EXIT", "NOP", "NOP", "RET.REL.NODEC R2 0x0"], {0, 1, 2, 4, 5}),
    ],
)
def test_where_a_thread_may_come_to(lines, expected):
    assert reached(lines) == expected


def test_two_calls_of_one_function_come_back_to_their_own_place():
    lines = ["MOV R2, 0x20", "CALL.REL.NOINC 0x60", "@P0 EXIT", "MOV R2, 0x50", "CALL.REL.NOINC 0x60", "EXIT"]
    lines += ["ACQBULK", "RET.REL.NODEC R2 0x0"]
    found = list(code(lines).reached())
    assert {place.index for place in found} == set(range(8))
    # The function stands in the way of everything behind the first call.
    assert reached(lines, [6]) == {0, 1}


@pytest.mark.parametrize(
    "lines",
    [
        ["BRX R4 -0x20"],
        ["BRA 0x1230"],
        ["CALL.ABS.NOINC R4"],
        ["RET.REL.NODEC R2 0x0"],
        ["CALL.REL.NOINC 0x10", "RET.REL.NODEC R2 0x0"],
        ["CALL.REL.NOINC 0x0"],
        ["NOP"],
    ],
    ids=["jump by register", "outside", "absolute call", "no call", "no address left", "recursion", "no end"],
)
def test_ways_that_the_code_does_not_tell_are_refused(lines):
    with pytest.raises(UnknownFlowError):
        reached(lines)


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ("LDG.E.128 R4, desc[UR4][R2.64]", ["R4", "R5", "R6", "R7"]),
        ("LDG.E.64 R4, desc[UR4][R2.64]", ["R4", "R5"]),
        ("LDG.E.U16 R4, desc[UR4][R2.64]", ["R4"]),
        ("LDCU.128 UR4, c[0x0][0x380]", ["UR4", "UR5", "UR6", "UR7"]),
        ("IMAD.WIDE.U32 R2, R9, 0x4, R6", ["R2", "R3"]),
        ("UIMAD.WIDE UR2, UR9, 0x4, UR6", ["UR2", "UR3"]),
        ("IADD.64 R2, R4, R6", ["R2", "R3"]),
        ("LEA.HI.X R3, R6, UR7, RZ, 0x2, P1", ["R3"]),
        ("SHF.L.U64.HI R34, R21, 0x7, R60", ["R34"]),
        ("ISETP.GE.AND P0, PT, R3, UR8, PT", []),
        ("CS2R R4, SRZ", ["R4", "R5"]),
        ("LDSM.16.M88.4 R4, [R8]", ["R4", "R5", "R6", "R7"]),
        ("FFMA2 R28, R4.F32, R30.F32x2.HI_LO, R28.F32x2.HI_LO", ["R28", "R29"]),
        ("HGMMA.64x16x16.F32.BF16 R24, gdesc[UR8], R24", [f"R{n}" for n in range(24, 32)]),
        ("SHFL.BFLY PT, R3, R0, 0x10, 0x1f", ["R3"]),
        ("ATOMG.E.ADD.STRONG.GPU PT, R7, desc[UR4][R2.64], R5", ["R7"]),
        ("VOTEU.ANY UP3, P2", []),
        ("VOTEU.ANY UR4, UPT, PT", ["UR4"]),
    ],
)
def test_the_registers_that_an_instruction_writes(text, targets):
    assert [flow.target for flow in effect(instruction(0, text)).flows] == targets


@pytest.mark.parametrize(
    ("text", "predicates"),
    [
        ("ISETP.GE.AND P0, PT, R3, UR8, P2", {"P0"}),
        ("IADD3 R4, P1, P2, R3, R5, RZ", {"P1", "P2"}),
        ("IADD3.X R4, R3, R5, RZ, P1, P2", set()),
        ("PLOP3.LUT P3, PT, P4, PT, UP0, 0x80, 0x0", {"P3"}),
        ("LOP3.LUT P0, RZ, R21, 0x10, RZ, 0xc0, !PT", {"P0"}),
        ("VOTEU.ANY UP3, P2", {"UP3"}),
        ("SHFL.UP P1, R3, R0, 0x10, RZ", {"P1"}),
        ("P2R R98, PR, RZ, 0x8", set()),
        ("R2P PR, R3, 0x7f", {f"{bank}{n}" for bank in ("P", "UP") for n in range(8)}),
    ],
)
def test_the_predicates_that_an_instruction_writes(text, predicates):
    assert effect(instruction(0, text)).predicates == predicates


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("P2R R30, PR, RZ, 0x1", ("R30", "P0")),
        ("P2R R30, PR, RZ, 0x40", ("R30", "P6")),
        ("P2R R30, PR, RZ, 0x6", None),
        ("P2R R30, PR, RZ, 0x80", None),
        ("P2R.B1 R30, PR, R30, 0x8", None),
        ("@P1 P2R R30, PR, RZ, 0x8", None),
        ("ISETP.NE.AND P3, PT, R30, RZ, PT", ("P3", "R30")),
        ("ISETP.NE.U32.AND P3, PT, R30.reuse, RZ, PT", ("P3", "R30")),
        ("ISETP.NE.AND P3, P4, R30, RZ, PT", None),
        ("ISETP.NE.OR P3, PT, R30, RZ, PT", None),
        ("ISETP.NE.AND P3, PT, R30, RZ, P1", None),
        ("ISETP.NE.AND.EX P3, PT, R30, RZ, PT, P1", None),
        ("@!P1 ISETP.NE.AND P3, PT, R30, RZ, PT", None),
    ],
)
def test_a_predicate_that_is_kept_in_a_register(text, same):
    assert effect(instruction(0, text)).same == same


@pytest.mark.parametrize("text", ["WHATEVER R0, R1", "IMAD.WIDE R0, R1", "LDL R0, [R4]", "STG.E R2, R4"])
def test_an_unknown_instruction_is_refused(text):
    with pytest.raises(UnknownInstructionError, match="known"):
        effect(instruction(0, text))
