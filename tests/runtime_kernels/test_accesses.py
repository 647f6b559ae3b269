"""What kernels read and write, derived from their compiled code, against what is declared of them; no GPU is needed."""

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
from tests.runtime_kernels.recorded import DEVICE_KERNELS, TILED, TILES, operands, record_on  # noqa: E402


def _places(tensors: dict[str, Any], names: set[str]) -> dict[int, str]:
    """The address of every operand of these names, and of the first of a list's."""
    found = {}
    for name in names:
        value = tensors[name]
        for tensor in value[:1] if isinstance(value, list) else [value]:
            found[tensor.data_ptr()] = name
    return found


def derived(name: str, monkeypatch, listed: bool = False, **options: Any) -> list[Accesses]:
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
        told = accesses_of(compile_offline(start))
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
@pytest.mark.parametrize("listed", [False, True], ids=["packed", "list"])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("name", TILED)
def test_other_tiles_and_layouts_do_what_is_declared(name, tile, listed, monkeypatch):
    check(name, derived(name, monkeypatch, listed, **({"tile": TILES[tile]} if TILES[tile] else {})))


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


def test_an_address_that_comes_from_no_parameter_is_lost():
    ptx = """
.visible .entry k(.param .u64 k_param_0, .param .u64 k_param_1)
{
	.reg .b64 %rd<9>;
	ld.param.b64 	%rd1, [k_param_0];
	ld.param.b64 	%rd2, [k_param_1];
	.loc 1 2 3
	ld.global.b32 { %r1 }, [ %rd1 + 0 ];
	@%p1 bra 	$L__BB0_2;
	griddepcontrol.wait;
$L__BB0_2:
	st.global.b32 [ %rd2 + 4 ], { %r1 };
	mov.u64 %rd3, 4096;
	@%p2 ld.global.b32 { %r2 }, [ %rd3 + 0 ];
	ld.shared.b32 %r3, [%r2];
	ret;
}
"""
    found = accesses(ptx, {0: "a", 1: "b"})
    assert found.reads == {"a"} and found.writes == {"b"} and found.early == {"a"}
    assert found.lost == ("ld.global.b32 { %r2 }, [ %rd3 + 0 ]",)
    assert undeclared(Traits(reads=("a",), writes=("b",), weights=("a",)), found) == [
        "an address cannot be followed: ld.global.b32 { %r2 }, [ %rd3 + 0 ]"
    ]
