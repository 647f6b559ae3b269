"""What kernels read and write, derived from their machine code, against what is declared of them; no GPU is needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="device code is compiled by triton")

import triton.language as tl  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from moe_compiler import pdl_rules  # noqa: E402
from moe_compiler.runtime_kernels import launching  # noqa: E402
from moe_compiler.runtime_kernels.accesses import Accesses, accesses, accesses_of, undeclared  # noqa: E402
from moe_compiler.runtime_kernels.audit import compile_offline  # noqa: E402
from moe_compiler.runtime_kernels.device import wait  # noqa: E402
from moe_compiler.runtime_kernels.launching import Start  # noqa: E402
from moe_compiler.runtime_kernels.registry import Traits, kernel  # noqa: E402
from tests.runtime_kernels.machine_code import LOADS, NAMES, code  # noqa: E402
from tests.runtime_kernels.recorded import DEVICE_KERNELS, TILED, TILES, operands, record_on  # noqa: E402


def _places(tensors: dict[str, Any], names: set[str]) -> dict[int, str]:
    """The address of every operand of these names, and of the first of a list's."""
    found = {}
    for name in names:
        value = tensors[name]
        for tensor in value[:1] if isinstance(value, list) else [value]:
            found[tensor.data_ptr()] = name
    return found


def derived(name: str, monkeypatch, listed: bool = False, arch: int = 90, **options: Any) -> list[Accesses]:
    """What the launches of a kernel read and write, by the names of its traits; memory of its own is "scratch"."""
    traits, tensors = kernel(name).traits, operands(listed=listed)
    places = _places(tensors, {*traits.reads, *traits.writes})
    tables: dict[int, str] = {}
    made = []

    def write_table(listed_tensors):
        table = torch.zeros(64, dtype=torch.int64)
        made.append(table)  # kept, so that no other tensor gets its address
        tables[table.data_ptr()] = places[listed_tensors[0].data_ptr()]
        return table

    monkeypatch.setattr(launching, "_write_table", write_table)
    found = []
    for start in record_on(tensors, name, True, torch.bfloat16, **options):
        told = accesses_of(compile_offline(start, arch))
        own: dict[str, str] = {}
        for parameter, operand in zip(start.kernel.arg_names, start.operands, strict=False):
            base = operand.base if isinstance(operand, TensorDescriptor) else operand
            if base is None:
                continue
            address = base.data_ptr()
            own[parameter] = "table" if address in tables else places.get(address, "scratch")
            own[f"{parameter}[]"] = tables.get(address, "no table")
        sets = [frozenset(own[p] for p in names) - {"table"} for names in (told.reads, told.writes, told.early)]
        found.append(Accesses(*sets, told.lost))
    return found


def check(name: str, found: list[Accesses]) -> None:
    traits = kernel(name).traits
    written: set[str] = set()
    for each in found:
        assert "no table" not in each.reads | each.writes
        assert "scratch" not in each.reads or "scratch" in written, "reads memory of its own that it has not written"
        written |= each.writes
        plain = [s - {"scratch"} for s in (each.reads, each.writes, each.early)]
        assert not undeclared(traits, Accesses(*plain, each.lost))
    optional = {"up", "grad_up", "up_bias", "grad_up_bias"}
    if name == "route_backward":
        optional.add("grad_expert_scale")  # summed from the programs' own sums by torch
    assert {*traits.writes} - optional == written - {"scratch"}
    reads = frozenset().union(*(each.reads for each in found))
    # The gradients of weights take the weights for their layout alone.
    layout = {"gate", "down", "gate_bias", "down_bias"} if name.startswith("grad_") else set()
    assert {*traits.reads} - optional - layout <= reads


@pytest.mark.parametrize("name", DEVICE_KERNELS)
def test_every_kernel_does_what_is_declared_of_it(name, monkeypatch):
    check(name, derived(name, monkeypatch))


@pytest.mark.slow
@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("listed", [False, True], ids=["packed", "list"])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("name", TILED)
def test_other_tiles_and_layouts_do_what_is_declared(name, tile, listed, arch, monkeypatch):
    check(name, derived(name, monkeypatch, listed, arch, **({"tile": TILES[tile]} if TILES[tile] else {})))


@pytest.mark.slow
@pytest.mark.parametrize("name", DEVICE_KERNELS)
def test_every_kernel_does_what_is_declared_of_it_on_blackwell(name, monkeypatch):
    check(name, derived(name, monkeypatch, arch=100))


@pytest.mark.parametrize("name", ["down_few", "grad_down"])
def test_memory_behind_a_table_of_addresses_is_followed(name, monkeypatch):
    check(name, derived(name, monkeypatch, listed=True))


def test_an_activation_that_is_declared_a_weight_is_caught(monkeypatch):
    """`down` is said to keep `act` constant; the code of `gate_up` before it writes there."""
    (first,), (second,) = derived("gate_up", monkeypatch), derived("down", monkeypatch)
    traits = replace(kernel("down").traits, weights=("down", "down_bias", "act"))

    def grid(name: str, found: Accesses, weights: frozenset[str], attribute: bool) -> pdl_rules.Grid:
        return pdl_rules.Grid(
            name=name,
            attribute=attribute,
            trigger=pdl_rules.Trigger.AFTER_WAIT,
            early_reads=weights & found.reads,
            reads=found.reads - weights,
            writes=found.writes,
            constants=weights & found.reads,
        )

    chain = [
        grid("gate_up", first, frozenset(kernel("gate_up").traits.weights), False),
        grid("down", second, frozenset(traits.weights), True),
    ]
    assert any(broken.storage == "act" for broken in pdl_rules.check(chain))
    right = [chain[0], grid("down", second, frozenset(kernel("down").traits.weights), True)]
    assert not pdl_rules.check(right)


@triton.jit
def _writes_its_source_kernel(source, target, PDL: tl.constexpr):
    at = tl.arange(0, 128)
    early = tl.load(source + at)
    wait(PDL)
    tl.store(target + at, early)
    tl.store(source + at, early + 1.0)


@triton.jit
def _either_kernel(first, second, target, which, PDL: tl.constexpr):
    wait(PDL)
    at = tl.arange(0, 128)
    for step in range(which):
        pointer = first if step % 2 == 0 else second
        tl.store(target + step * 128 + at, tl.load(pointer + at))


@triton.jit
def _from_a_number_kernel(address, target, PDL: tl.constexpr):
    wait(PDL)
    at = tl.arange(0, 128)
    tl.store(target + at, tl.load(address.to(tl.pointer_type(tl.float32)) + at))


def _start(function: Any, tensors: int, numbers: tuple[int, ...] = ()) -> Start:
    return Start(function, 1, tuple(torch.zeros(4096) for _ in range(tensors)), numbers, {}, True, 4, 1)


def test_what_is_not_declared_is_told():
    found = accesses_of(compile_offline(_start(_writes_its_source_kernel, 2)))
    assert found == Accesses(frozenset({"source"}), frozenset({"source", "target"}), frozenset({"source"}), ())
    traits = Traits(reads=("source",), writes=("target",))
    assert undeclared(traits, found) == [
        "writes source, which is not declared so",
        "touches before the wait source, which is not declared so",
    ]
    constant = replace(traits, weights=("source",), writes=("target", "source"))
    assert undeclared(constant, found) == ["writes source, which is declared constant"]


def test_an_address_that_may_be_either_counts_as_both():
    found = accesses_of(compile_offline(_start(_either_kernel, 3, (4,))))
    assert found.reads == {"first", "second"} and found.writes == {"target"} and not found.early and not found.lost


LOST = "an address cannot be followed: "


def follow(*lines: str) -> Accesses:
    return accesses(code([*lines, "EXIT"]), NAMES)


def test_an_address_that_comes_from_no_parameter_is_lost():
    found = follow(LOADS["a"], "MOV R2, 0x1000", "MOV R3, RZ", "LDG.E R4, desc[UR12][R2.64]")
    assert found == Accesses(frozenset(), frozenset(), frozenset(), (LOST + "LDG.E R4, desc[UR12][R2.64]",))
    assert undeclared(Traits(reads=("a",), writes=()), found) == [LOST + "LDG.E R4, desc[UR12][R2.64]"]


def test_both_words_of_an_address_must_be_of_one_parameter():
    mixed = (LOADS["a"], LOADS["b"], "MOV R2, UR4", "MOV R3, UR7", "STG.E desc[UR12][R2.64], R4")
    assert follow(*mixed).lost == (LOST + mixed[-1],)
    half = (LOADS["a"], "MOV R2, UR4", "STG.E desc[UR12][R2.64], R4")
    assert follow(*half).lost == (LOST + half[-1],)


def test_a_register_that_is_used_again_is_followed_anew():
    found = follow(
        LOADS["a"],
        "IMAD.WIDE R2, R0, 0x4, UR4",
        "LDG.E R6, desc[UR12][R2.64]",
        "ULDC.64 UR4, c[0x0][0x218]",
        "IADD3 R2, P0, R6, UR4, RZ",
        "IADD3.X R3, RZ, UR5, RZ, P0, !PT",
        "STG.E desc[UR12][R2.64+0x10], R6",
    )
    assert found == Accesses(frozenset({"a"}), frozenset({"b"}), frozenset(), ())


def test_where_ways_meet_an_address_may_be_either():
    lines = [LOADS["a"], LOADS["b"], "MOV R2, UR4", "MOV R3, UR5", "@P0 BRA 0x70", "MOV R2, UR6", "MOV R3, UR7"]
    assert follow(*lines, "LDG.E R4, desc[UR12][R2.64]").reads == {"a", "b"}


def test_a_guard_separates_what_it_lets_be_written_from_what_was_there():
    lines = [LOADS["a"], LOADS["b"], "MOV R2, UR4", "MOV R3, UR5", "@P0 MOV R2, UR6", "@P0 MOV R3, UR7"]
    assert follow(*lines, "@P0 STG.E desc[UR12][R2.64], R4").writes == {"b"}
    assert follow(*lines, "@!P0 STG.E desc[UR12][R2.64], R4").writes == {"a"}
    assert follow(*lines, "STG.E desc[UR12][R2.64], R4").writes == {"a", "b"}
    # Once the predicate may be another one, nothing separates them.
    again = (*lines, "ISETP.GE.AND P0, PT, R9, RZ, PT", "@P0 STG.E desc[UR12][R2.64], R4")
    assert follow(*again).writes == {"a", "b"}
    changing = (*lines[:4], "@P0 IADD3 R2, P0, R9, UR6, RZ", "@P0 IADD3 R3, R9, UR7, RZ")
    assert follow(*changing, "STG.E desc[UR12][R2.64], R4").writes == {"a", "b"}
    assert "a" in follow(*changing[:5], "MOV R3, UR5", "@P0 STG.E desc[UR12][R2.64], R4").writes
    # What is computed without a guard depends on it too.
    moved = (*lines, "IADD3 R4, P1, R2, 0x10, RZ", "IADD3.X R5, RZ, R3, RZ, P1, !PT")
    assert follow(*moved, "@P0 STG.E desc[UR12][R4.64], R9").writes == {"b"}


def test_a_predicate_of_the_warp_stands_for_that_of_its_threads():
    lines = [LOADS["a"], LOADS["b"], "MOV R2, UR6", "MOV R3, UR7", "VOTEU.ANY UP3, P2"]
    lines += ["@P2 R2UR UR4, R2", "@P2 R2UR UR5, R3"]
    store = ["@UP3 UIADD3 UR4, UP1, UR4, 0x10, URZ", "LDG.E R9, desc[UR12][UR4.64]"]
    assert follow(*lines, "@UP3 STG.E desc[UR12][UR4.64], R4").writes == {"b"}
    # It goes on holding when the threads' own predicate changes, and not when it changes itself.
    assert follow(*lines, "ISETP.GE.AND P2, PT, R9, RZ, PT", "@UP3 STG.E desc[UR12][UR4.64], R4").writes == {"b"}
    assert follow(*lines, "VOTEU.ANY UP3, P1", "@UP3 STG.E desc[UR12][UR4.64], R4").writes == {"a", "b"}
    # A thread's own register may be unwritten where only the warp's predicate holds.
    own = ["MOV R4, UR4", "MOV R5, UR5", "VOTEU.ANY UP3, P2", "@P2 MOV R4, R2", "@P2 MOV R5, R3"]
    assert follow(*lines[:4], *own, "@UP3 STG.E desc[UR12][R4.64], R9").writes == {"a", "b"}
    assert follow(*lines[:4], *own, "@P2 STG.E desc[UR12][R4.64], R9").writes == {"b"}
    # Other threads may have written a register of the warp.
    assert follow(*lines, "@!P2 STG.E desc[UR12][UR4.64], R4").writes == {"a", "b"}
    assert follow(*lines, *store).reads == {"a", "b"}


# The address of a descriptor, moved under a guard whose predicate is put into a register, used for something else, and
# taken back: as triton 3.9 compiles weights whose rows and columns are exchanged. R37, UR4 and UR5 held others before.
KEPT = [
    LOADS["a"],
    "ULDC.64 UR6, c[0x0][0x198]",
    "MOV R12, UR6",
    "MOV R13, UR7",
    "MOV R37, UR7",
    "@P3 IADD3 R37, P2, R12, 0x40, RZ",
    "@P3 IMAD.X R38, RZ, RZ, R13, P2",
    "P2R R30, PR, RZ, 0x8",
    "ISETP.NE.U32.AND P3, PT, R10, RZ, PT",
    "@P3 STS [R20], R21",
    "ISETP.NE.AND P3, PT, R30, RZ, PT",
    "@P3 R2UR UR10, R37",
    "@P3 R2UR UR4, R38",
    "IMAD.U32 R4, RZ, RZ, UR10",
    "IMAD.U32 R5, RZ, RZ, UR4",
    "@P3 R2UR UR4, R4",
    "@P3 R2UR UR5, R5",
    "VOTEU.ANY UP1, P3",
    "PLOP3.LUT P3, PT, PT, PT, UP0, 0x80, 0x0",
    "@UP1 UTMALDG.2D [UR16], [UR4]",
]


def test_a_guard_is_the_same_after_its_predicate_comes_back_from_a_register():
    assert follow(*KEPT) == Accesses(frozenset({"tensor"}), frozenset(), frozenset(), ())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # Another predicate: taken back from another register, in another guard, in the vote, of the tile itself.
        (("ISETP.NE.AND P3, PT, R30, RZ, PT",), ("ISETP.NE.AND P3, PT, R31, RZ, PT",)),
        (("ISETP.NE.AND P3, PT, R30, RZ, PT",), ("ISETP.NE.AND P3, PT, R30, R31, PT",)),
        (("@P3 R2UR UR10, R37",), ("@P4 R2UR UR10, R37",)),
        (("@P3 R2UR UR4, R4",), ("@P4 R2UR UR4, R4",)),
        (("VOTEU.ANY UP1, P3",), ("VOTEU.ANY UP1, P4",)),
        (("@UP1 UTMALDG.2D [UR16], [UR4]",), ("@UP2 UTMALDG.2D [UR16], [UR4]",)),
        # Another bit is kept, more than one, or only where another guard lets it.
        (("P2R R30, PR, RZ, 0x8",), ("P2R R30, PR, RZ, 0x10",)),
        (("P2R R30, PR, RZ, 0x8",), ("P2R R30, PR, RZ, 0x18",)),
        (("P2R R30, PR, RZ, 0x8",), ("P2R R30, PR, R9, 0x8",)),
        (("P2R R30, PR, RZ, 0x8",), ("@P1 P2R R30, PR, RZ, 0x8",)),
        # The predicate or what keeps it has changed: before it is kept, between, after it comes back, by an own guard.
        (("P2R R30, PR, RZ, 0x8",), ("ISETP.GE.AND P3, PT, R9, RZ, PT", "P2R R30, PR, RZ, 0x8")),
        (("@P3 STS [R20], R21",), ("MOV R30, R21",)),
        (("@P3 STS [R20], R21",), ("@P3 MOV R30, R21",)),
        (("@P3 STS [R20], R21",), ("LDS.64 R30, [R20]",)),
        (("@P3 STS [R20], R21",), ("LDS.128 R28, [R20]",)),
        (("@P3 R2UR UR10, R37",), ("ISETP.GE.AND P3, PT, R9, RZ, PT", "@P3 R2UR UR10, R37")),
        (("@P3 R2UR UR10, R37",), ("IADD3 R9, P3, R9, R8, RZ", "@P3 R2UR UR10, R37")),
        (("@P3 R2UR UR10, R37",), ("R2P PR, R9, 0x8", "@P3 R2UR UR10, R37")),
        (("VOTEU.ANY UP1, P3",), ("ISETP.GE.AND P3, PT, R9, RZ, PT", "VOTEU.ANY UP1, P3")),
        (("VOTEU.ANY UP1, P3",), ("VOTEU.ANY UP1, P3", "VOTEU.ANY UP1, P4")),
        (("ISETP.NE.AND P3, PT, R30, RZ, PT",), ("@P1 ISETP.NE.AND P3, PT, R30, RZ, PT",)),
        # The opposite of it.
        (("ISETP.NE.AND P3, PT, R30, RZ, PT",), ("ISETP.EQ.AND P3, PT, R30, RZ, PT",)),
        (("@P3 R2UR UR10, R37",), ("@!P3 R2UR UR10, R37",)),
        (("@P3 R2UR UR4, R4",), ("@!P3 R2UR UR4, R4",)),
        (("VOTEU.ANY UP1, P3",), ("VOTEU.ANY UP1, !P3",)),
        (("@UP1 UTMALDG.2D [UR16], [UR4]",), ("@!UP1 UTMALDG.2D [UR16], [UR4]",)),
        (("@UP1 UTMALDG.2D [UR16], [UR4]",), ("UTMALDG.2D [UR16], [UR4]",)),
        # Only one word is moved.
        (("@P3 IMAD.X R38, RZ, RZ, R13, P2",), ()),
        (("@P3 IADD3 R37, P2, R12, 0x40, RZ",), ()),
        (("@P3 R2UR UR10, R37",), ()),
        (("@P3 R2UR UR4, R4",), ()),
        (("@P3 R2UR UR5, R5",), ()),
        # What is moved first is of whichever thread comes first.
        (("@P3 R2UR UR10, R37",), ("R2UR UR10, R37",)),
        # Threads may have come that vote, and have moved nothing; a way leads around what keeps the predicate.
        (("VOTEU.ANY UP1, P3",), ("WARPSYNC 0xffffffff", "VOTEU.ANY UP1, P3")),
        (("P2R R30, PR, RZ, 0x8",), ("@P1 BRA 0x90", "P2R R30, PR, RZ, 0x8")),
    ],
    ids=lambda lines: " / ".join(lines) or "nothing",
)
def test_what_only_looks_like_the_guard_that_came_back_is_refused(old, new):
    at = next(n for n in range(len(KEPT)) if tuple(KEPT[n : n + len(old)]) == old)
    lines = [*KEPT[:at], *new, *KEPT[at + len(old) :]]
    assert follow(*lines).lost == (LOST + lines[-1],)


def test_what_threads_share_may_be_from_any_of_them():
    lines = [LOADS["a"], LOADS["b"], "MOV R2, UR4", "MOV R3, UR5", "@P0 MOV R2, UR6", "@P0 MOV R3, UR7"]
    # A register of the warp is that of a thread of which nothing is known.
    own = ["R2UR UR8, R2", "R2UR UR9, R3", "@P0 STG.E desc[UR12][UR8.64], R4"]
    assert follow(*lines, *own).writes == {"a", "b"}
    # So is what comes from another thread's register.
    for guard in ("", "@P0 "):
        turned = [f"{guard}SHFL.IDX PT, R{n + 4}, R{n}, R9, 0x1f" for n in (2, 3)]
        assert follow(*lines, *turned, "@P0 STG.E desc[UR12][R6.64], R4").writes == {"a", "b"}
    # Shared memory is written by threads with other predicates, and where others read it no way leads back to.
    both = ["STS.64 [R7], R2", "@P1 STS.64 [R7], R4", "@!P1 LDS.64 R10, [R8]", "@!P1 STG.E desc[UR12][R10.64], R9"]
    assert follow(*lines[:4], "MOV R4, UR6", "MOV R5, UR7", *both).writes == {"a", "b"}
    roles = ["@P1 BRA 0x80", "LDS.64 R10, [R8]", "STG.E desc[UR12][R10.64], R9", "EXIT", "STS.64 [R7], R2"]
    assert follow(*lines[:4], *roles).writes == {"a"}


@pytest.mark.parametrize("parting", ["@P1 EXIT", "WARPSYNC 0xffffffff"])
def test_a_vote_among_other_threads_does_not_tell_what_was_written(parting):
    """Those that wrote the register may be gone, and those that did not may have come."""
    lines = [LOADS["a"], LOADS["b"], "MOV R2, UR6", "MOV R3, UR7", "@P2 R2UR UR4, R2", "@P2 R2UR UR5, R3"]
    asked = ["VOTEU.ANY UP3, P2", "@!UP3 STG.E desc[UR12][UR4.64], R4"]
    assert follow(*lines, *asked).writes == {"a"}
    assert follow(*lines, parting, *asked).writes == {"a", "b"}


def test_what_is_loaded_is_an_address_only_from_a_table():
    lines = ["IMAD.WIDE R2, R0, 0x8, UR10", "LDG.E.64 R4, desc[UR12][R2.64]", "STG.E desc[UR12][R4.64], R9"]
    assert follow(LOADS["table"], *lines).writes == {"table[]"}
    assert follow("ULDC.64 UR10, c[0x0][0x210]", *lines).lost == (LOST + lines[-1],)
    # Through shared memory, too.
    copied = ["STS.64 [R7], R4", "LDS.64 R10, [R8]", "STG.E desc[UR12][R10.64], R9"]
    assert follow(LOADS["table"], *lines[:2], *copied).writes == {"table[]"}
    staged = ["LDGSTS.E.64 [R7], desc[UR12][R2.64]", "LDS.64 R10, [R8]", "LDG.E R9, desc[UR12][R10.64]"]
    assert follow(LOADS["table"], lines[0], *staged).reads == {"table", "table[]"}


@pytest.mark.parametrize(("architecture", "own"), [(90, "0x198"), (100, "0x348")])
def test_a_tile_is_followed_to_its_descriptor(architecture, own):
    def reads(step: str) -> Accesses:
        lines = [
            f"ULDC.64 UR4, c[0x0][{own}]",
            f"UIADD3 UR4, UP0, UR4, {step}, URZ",
            "UIADD3.X UR5, URZ, UR5, URZ, UP0",
        ]
        return accesses(code([*lines, "UTMALDG.2D [UR8], [UR4]", "EXIT"], architecture), NAMES)

    assert reads("0x40") == Accesses(frozenset({"tensor"}), frozenset(), frozenset(), ())
    assert reads("0x48").lost == reads("UR6").lost == (LOST + "UTMALDG.2D [UR8], [UR4]",)


def test_a_spilled_address_is_followed_by_its_place_on_the_stack():
    lines = [LOADS["a"], LOADS["b"], "MOV R2, UR4", "MOV R3, UR5", "STL.64 [R1+0x8], R2", "MOV R6, UR6", "MOV R7, UR7"]
    lines += ["STL.64 [R1], R6", "LDL.64 R8, [R1+0x8]", "STG.E desc[UR12][R8.64], R9"]
    assert follow(*lines).writes == {"a"}


@pytest.mark.parametrize("text", ["BRX R4 -0x10", "WHATEVER R2, R3"])
def test_code_that_is_not_understood_is_told(text):
    found = follow(LOADS["a"], text)
    assert len(found.lost) == 1 and text in found.lost[0] and not found.reads


def test_what_may_precede_the_wait_is_told():
    lines = [LOADS["a"], LOADS["b"], "MOV R2, UR4", "MOV R3, UR5", "MOV R6, UR6", "MOV R7, UR7", "@P0 BRA 0x80"]
    lines += ["ACQBULK", "LDG.E R4, desc[UR12][R2.64]", "ACQBULK", "STG.E desc[UR12][R6.64], R4"]
    assert follow(*lines).early == {"a"}
