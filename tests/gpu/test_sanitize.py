"""The sanitizer's run: that it launches every kernel in every tile, and what it makes of a tool's output. No GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the device kernels are written in triton, which is not installed")

from moe_compiler.runtime_kernels import launching
from moe_compiler.runtime_kernels.audit import compile_offline
from moe_compiler.runtime_kernels.sass import Code, disassemble
from moe_compiler.runtime_kernels.tiles import TABLES
from tests.gpu.barriers import handed_over
from tests.gpu.every_launch import BLOCKS, launches
from tests.gpu.sanitize import explain, main, read
from tests.runtime_kernels.recorded import DEVICE_KERNELS, operands, record_on


def test_every_kernel_is_launched_in_every_tile():
    made: dict[str, list[launching.Start]] = {}
    for name, block in BLOCKS.items():
        for what, run in launches(block, "cpu"):
            with launching.recording() as starts:
                run()
            assert starts, f"{name}: {what} launches nothing"
            made.setdefault(f"{name}: {what}", []).extend(starts)
    assert {what.partition(": ")[2].partition(" ")[0] for what in made} == set(DEVICE_KERNELS)
    for kernel, table in TABLES.items():
        for dtype, block in (
            (torch.bfloat16, "packed"),
            (torch.bfloat16, "list, odd sizes"),
            (torch.float32, "float32"),
        ):
            for _, tile in table.ranges(dtype, 90):
                assert f"{block}: {kernel} {tile.rows}x{tile.cols}x{tile.depth}" in made
    kernels = {start.kernel.__name__ for starts in made.values() for start in starts}
    assert {"scatter_product_specialised_kernel", "scatter_product_kernel", "router_logits_few_kernel"} <= kernels
    assert {"order_kernel", "order_count_kernel", "order_scatter_kernel", "sum_parts_kernel"} <= kernels
    assert {"bias_scores_kernel", "grad_bias_kernel", "gate_up_few_kernel", "down_few_kernel"} <= kernels


def test_the_rows_are_ragged_and_some_experts_have_none():
    from tests.gpu.cases import routing

    for name in ("packed", "list, odd sizes", "many tokens"):
        block = BLOCKS[name]
        ids = routing(block.case, block.tokens).flatten()
        rows = torch.bincount(ids[(ids >= 0) & (ids < block.case.experts)], minlength=block.case.experts)
        assert len(rows.unique()) > 2, name
    assert (torch.bincount(routing(BLOCKS["packed"].case, 150).flatten()) == 0).any()


CLEAN = """\
========= COMPUTE-SANITIZER
launch: packed: down 128x256x64
launch: packed: combine
all launches made
launch: planted
========= Invalid __global__ write of size 4 bytes
=========     at one_too_far+0x90
=========     by thread (127,0,0) in block (0,0,0)
the planted fault: CUDA error: unspecified launch failure
========= ERROR SUMMARY: 1 error
"""


def test_a_clean_run():
    found = read(CLEAN)
    assert found.launches == ["packed: down 128x256x64", "packed: combine"]
    assert found.errors == 0 and found.verdict("memcheck") == ""


def test_a_run_that_finds_nothing_at_all_shows_nothing():
    silent = "\n".join(line for line in CLEAN.splitlines() if not line.startswith("="))
    assert "the planted fault was not found" in read(silent).verdict("memcheck")
    assert read(silent).verdict("racecheck") == ""


def test_findings_belong_to_the_launch_before_them():
    bad = CLEAN.replace(
        "launch: packed: combine\n",
        "========= Invalid __global__ read of size 2 bytes\n=========     at scatter_product_kernel+0x90\n"
        "========= Invalid __global__ read of size 2 bytes\nlaunch: packed: combine\n"
        "========= Error: Race reported between Write access at combine_kernel+0x1 and Read access [8 hazards]\n",
    )
    found = read(bad)
    assert found.errors == 3 and found.verdict("memcheck") == "3 errors"
    assert len(found.findings["packed: down 128x256x64"]) == 2
    assert found.findings["packed: combine"][0].startswith("Error: Race reported")


@pytest.fixture(scope="module")
def specialised() -> Code:
    """The machine code of the second matmul with specialised warps."""
    given = operands(hidden=256, inner=256)
    (start,) = record_on(given, "down", False, given["x"].dtype, tile=TABLES["down"].hopper[-1][1])
    return disassemble(compile_offline(start).asm["cubin"])


def race(code: Code, read: int, *writes: int) -> str:
    """What racecheck prints of a race, the accesses by the indices of their instructions."""
    places = [f"{code.kernel}+0x{code.instructions[index].address:x} in a.py:1" for index in (read, *writes)]
    said = [f"========= Error: Race reported between Read access at {places[0]}"]
    return "\n".join([*said, *(f"=========     and Write access at {place} [9 hazards]" for place in places[1:])])


def test_the_hand_over_of_roles_is_no_race(specialised: Code):
    kinds = [found.opcode.partition(".")[0] for found in specialised.instructions]
    role = next(n for n, found in enumerate(specialised.instructions) if found.opcode == "LDS.U8")
    told = [n for n, found in enumerate(specialised.instructions) if found.opcode == "STS.64"]
    assert len(told) == 2, "the roles at the beginning, and the word that there are no more"
    reported = f"launch: packed: down\n{race(specialised, role, *told)}\n"
    found = read(reported)
    assert found.errors == 1
    explain(found, lambda launch: [specialised] if launch == "packed: down" else [])
    assert found.errors == 0 and len(found.explained["packed: down"]) == 1

    # The results of a tile go through shared memory behind barriers of 128 threads: those explain nothing here.
    store, load = kinds.index("STS", kinds.index("LDS") + 1), kinds.index("LDSM")
    for wrong in (
        race(specialised, role, store),
        race(specialised, load, *told),
        race(specialised, role, role),
        race(specialised, role, *told).replace(specialised.kernel, "another"),
    ):
        assert not handed_over(specialised, wrong)
    found = read(f"launch: packed: down\n{race(specialised, role, store)}\n")
    explain(found, lambda launch: [specialised])
    assert found.errors == 1 and not found.explained


def test_a_run_that_was_stopped_says_where():
    stopped = read(CLEAN.partition("all launches made")[0])
    assert stopped.verdict("racecheck") == "ended at packed: combine"
    assert read("no such tool").verdict("memcheck") == "ended at its start"


def test_without_a_gpu_it_says_what_is_missing(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert main([]) == 2
    assert "sanitize: needs " in capsys.readouterr().err
