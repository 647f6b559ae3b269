"""Tuning on a device: a short search, what it keeps, and that a compile with tuned tiles is right."""

from __future__ import annotations

import json

import pytest
import torch

from moe_compiler import cli
from moe_compiler.backend import last_reports, resolve_options
from moe_compiler.block_program import backward_program, forward_program, inputs_of, weights_of
from moe_compiler.runtime_kernels.registry import tiled
from moe_compiler.tuning.command import cases_of, sizes_of, tune_shape
from moe_compiler.tuning.compile_pool import CompilePool
from moe_compiler.tuning.tile_table import look_up, read_tiles, table_path
from moe_compiler.tuning.tune_block import limits_of, tasks_of
from moe_compiler.tuning.tuned_tiles import with_tiles
from tests.moe_compiler.blocks import assert_accurate, float64_block, qwen3_block

pytestmark = pytest.mark.gpu
bench = pytest.importorskip("moe_compiler.tuning.bench", reason="triton is not installed")

SIZES = sizes_of("16,2,512,256")
TOLERANCE = 6e-3


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("MOEPDL_CACHE_DIR", str(tmp_path))


def test_the_device_says_what_it_allows():
    limits = limits_of()
    major, minor = torch.cuda.get_device_capability()
    assert limits.capability == 10 * major + minor and limits.multiprocessors > 0
    if limits.capability == 90:
        assert limits.shared == 232448


@pytest.mark.parametrize("train", [False, True])
def test_a_search_ends_in_time_and_its_tiles_compute_the_same(train):
    weights = weights_of(SIZES, "cuda")
    with CompilePool() as pool:
        found = tune_shape(SIZES, (2, 64, 1024), budget_s=40 if train else 20, pool=pool, train=train)
    assert len(found) == (3 if train else 1)
    for tuning, case in zip(found, cases_of(SIZES, train=train), strict=True):
        assert tuning.tried > 0 and tuning.seconds < 60
        assert not any("illegal" in why for why in tuning.dropped.values())
        assert all(after <= before for before, after in tuning.chain_us.values())
        points, why = look_up(torch.cuda.get_device_name(), case.block)
        assert why == "" and points == tuning.points
        share = SIZES.k / SIZES.experts
        for tokens in (1, 2, 64, 100, 1024):
            operands = inputs_of(SIZES, tokens, weights, "cuda", backward=case.backward)
            plain = torch.ops.moepdl.chain(operands, case.program.to_text())
            text = with_tiles(case.program, points, share).to_text()
            for _ in range(3):  # the long way, then bound, then as a graph
                tuned = torch.ops.moepdl.chain(operands, text)
                for a, b in zip(plain, tuned, strict=True):
                    if a.is_floating_point():
                        assert (a.float() - b.float()).norm() <= TOLERANCE * a.float().norm()
                    else:
                        assert torch.equal(a, b)


@pytest.mark.parametrize("tokens", [2, 64, 1024])
def test_likely_candidates_of_every_kernel_compute_what_its_own_tile_does(tokens):
    weights = weights_of(SIZES, "cuda")
    seen = set()
    for program, backward in ((forward_program(SIZES), False), (backward_program(SIZES), True)):
        (case,) = (case for case in cases_of(SIZES, train=True) if case.program == program)
        runs = [inputs_of(SIZES, tokens, weights, "cuda", backward=backward) for _ in range(2)]
        made = bench.Bench(program.to_text(), runs)
        for task in tasks_of(program, SIZES.named, case.weights, (tokens,), limits_of()):
            for tile in task.pool[:3]:
                assert made.problem(made.index(task.kernel), tile) == "", (task, tile)
            times = made.times_us(made.index(task.kernel), [None, *task.pool[:3]], 3)
            assert all(0 < us < 1e5 for us in times.values())
            seen.add(task.kernel)
    assert seen <= set(tiled()) and len(seen) >= 8


def test_the_command_prints_a_line_that_can_be_pasted_and_writes_a_file_that_can_be_named(tmp_path, capsys):
    out = tmp_path / "tiles.json"
    assert cli.main(["tune", "--shape", "8,2,256,128", "--tokens", "64", "--budget", "12", "-o", str(out)]) == cli.DONE
    said = capsys.readouterr().out
    (block,) = read_tiles(out)
    assert said.startswith(block) and str(out) in said
    last = said.splitlines()[-1]
    if last.startswith("to fix it: options="):
        given = resolve_options(json.loads(last.removeprefix("to fix it: options=")))
        assert block in given.tiles
    assert block in resolve_options({"tiles": str(out)}).tiles


def test_a_compile_with_full_tunes_once_and_is_right():
    block = qwen3_block(torch.bfloat16).cuda()
    x = torch.randn(1, 200, 32, device="cuda", dtype=torch.bfloat16)
    numbers = torch.cuda.get_rng_state()
    name = torch.cuda.get_device_name()
    with torch.no_grad():
        want, exact = block(x), float64_block(block, x)
        tables = []
        for tune in ("full", "full", "cached"):
            torch.compiler.reset()
            options = {"tune": tune, "tune_budget_s": 10, "require_match": True}
            assert_accurate(torch.compile(block, backend="moepdl", options=options)(x), want, exact)
            assert last_reports()[-1].tiles == f"tuned on {name}"
            tables.append(table_path(name).stat().st_mtime_ns)
    assert torch.equal(numbers, torch.cuda.get_rng_state())
    assert len(set(tables)) == 1, "looked up, not searched anew"
