"""Candidates for a kernel's tile: what the rules make, what the limits take out, and that the rest compiles.

Compiled for sm_90 without a GPU: shared memory is within what was reckoned, and the audit is passed.
"""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest
import torch

from moe_compiler.block_program import BlockSizes, backward_program, forward_program, inputs_of, weights_of
from moe_compiler.runtime_kernels.registry import tiled
from moe_compiler.runtime_kernels.tiles import COLUMNS, DEPTHS, SIDES, TABLES, check_tile, choose_tile, parse_tile
from moe_compiler.tuning.candidates import HOPPER, Limits, Work, candidates, estimate_us, fits, neighbours, shared_bytes
from moe_compiler.tuning.tune_block import tasks_of
from moe_compiler.tuning.tuned_tiles import Stored

QWEN = BlockSizes(128, 8, 2048, 768)
SHAPES = {
    "qwen3": QWEN,
    "mixtral": BlockSizes(8, 2, 4096, 14336),
    "qwen3-next": BlockSizes(512, 10, 2048, 512),
    "gpt-oss": BlockSizes(32, 4, 2880, 2880),
    "small": BlockSizes(32, 4, 256, 96),
}
A100 = Limits(80, 166912, 108)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", tiled())
@pytest.mark.parametrize("tokens", [1, 16, 300, 4096])
def test_candidates_are_tiles_that_the_kernel_takes(kernel, shape, tokens):
    work = Work(kernel, SHAPES[shape].named, tokens, True)
    for limits in (HOPPER, A100):
        found = candidates(replace(work, boxes=limits is HOPPER), limits)
        assert found and len(set(found)) == len(found)
        for tile in found:
            check_tile(kernel, tile, tiled())
            assert parse_tile(str(tile)) == tile
            assert shared_bytes(work, tile) <= limits.shared
            assert limits is HOPPER or not (tile.tma or tile.instead)
            if tile.tma:
                assert work.sides[0] % tile.depth == 0


def test_there_are_none_for_float32():
    assert candidates(Work("down", replace(QWEN, dtype=torch.float32).named, 64, True), HOPPER) == []


def test_unlike_tiles_come_before_variations_of_one():
    found = candidates(Work("gate_up", QWEN.named, 8192, True), HOPPER)
    shapes = [(t.rows, t.cols, t.depth, t.swap) for t in found]
    assert len(set(shapes[:6])) == 6
    assert found[0].rows == 128 and found[0].cols == 128


@pytest.mark.parametrize("kernel", ["gate_up", "down", "grad_act", "grad_pairs", "grad_gate_up"])
@pytest.mark.parametrize("tokens", [64, 1024, 8192])
def test_the_estimate_thinks_well_of_the_tiles_that_were_found_by_measuring(kernel, tokens):
    work = Work(kernel, QWEN.named, tokens, True)
    own = choose_tile(kernel, torch.bfloat16, -(-work.pairs // 128), 90, work.sides)
    best = estimate_us(work, candidates(work, HOPPER)[0], HOPPER)
    assert estimate_us(work, own, HOPPER) <= (1.4 if kernel != "grad_gate_up" else 2.0) * best


# Of docs/benchmarks/many_tokens.json: microseconds of these kernels as they are shipped.
@pytest.mark.parametrize(
    ("kernel", "tokens", "measured"),
    [("gate_up", 2048, 251), ("gate_up", 8192, 717), ("down", 2048, 142), ("down", 4096, 207), ("down", 8192, 362)],
)
def test_the_estimate_is_near_measured_times(kernel, tokens, measured):
    work = Work(kernel, QWEN.named, tokens, True)
    tile = choose_tile(kernel, torch.bfloat16, tokens * 8 // 128, 90, work.sides)
    assert estimate_us(work, tile, HOPPER) == pytest.approx(measured, rel=0.25)


def test_an_estimate_grows_with_what_is_wasted():
    work = Work("down", BlockSizes(128, 8, 2176, 768).named, 8192, True)
    wide, narrow = parse_tile("128x256x64 w8 s4 g8 tma"), parse_tile("128x128x64 w8 s4 g8 tma")
    whole = Work("down", QWEN.named, 8192, True)
    assert estimate_us(work, wide, HOPPER) / estimate_us(whole, wide, HOPPER) > 1.1
    assert estimate_us(whole, wide, HOPPER) < estimate_us(whole, narrow, HOPPER)


@pytest.mark.parametrize(
    ("kernel", "text", "why"),
    [
        ("gate_up", "128x256x64 w8 s2 tma", "gate and up of 128 x 256 take more than half of the registers"),
        ("down", "128x256x64 w8 s5 tma", "five stages take 245760 bytes"),
        ("down", "128x256x64 w4 s3 tma", "256 results a thread"),
        ("down", "128x128x64 w8 s3 tma r40", "fewer registers than results"),
        ("down", "16x64x64 w8 s3 tma", "eight warps for 16 x 64 results"),
        ("gate_up_few", "1x32x256 w1 s3", "512 sums a thread"),
    ],
)
def test_what_cannot_run_is_left_out(kernel, text, why):
    assert not fits(Work(kernel, QWEN.named, 4096, True), parse_tile(text), HOPPER), why


def test_specialised_warps_only_where_they_run():
    work = Work("down", QWEN.named, 8192, True)
    assert any(tile.instead for tile in candidates(work, HOPPER))
    for other, limits in (
        (replace(work, boxes=False), HOPPER),
        (work, Limits(100, 232448, 148)),
        (Work("down", BlockSizes(512, 10, 2048, 512).named, 8192, True), HOPPER),
        (Work("gate_up", QWEN.named, 8192, True), HOPPER),
    ):
        assert not any(tile.instead for tile in candidates(other, limits))


def test_neighbours_differ_by_one_step_of_one_field():
    pool = candidates(Work("gate_up", QWEN.named, 1024, True), HOPPER)
    own = next(tile for tile in pool if (tile.rows, tile.cols, tile.stages) == (64, 64, 3))
    near = neighbours(own, pool)
    assert near and own not in near
    assert replace(own, stages=4) in near and replace(own, stages=5) not in near
    assert replace(own, halves=not own.halves) in near
    assert replace(own, halves=not own.halves, stages=4) not in near


@pytest.mark.parametrize(
    ("gate", "boxes"),
    [
        (Stored("gate", 1, "bfloat16", (128, 1536, 2048), (1536 * 2048, 2048, 1)), True),
        (Stored("gate", 1, "bfloat16", (128, 1536, 2048), (1536 * 2048, 1, 1536)), True),
        (Stored("gate", 1, "bfloat16", (128, 2, 768, 2048), (1536 * 2048, 1, 2, 1536)), True),
        (Stored("gate", 1, "bfloat16", (128, 2, 768, 2048), (1536 * 2048, 2048, 4096, 1)), True),
        (Stored("gate", 1, "bfloat16", (128, 1536, 2048), (2048, 128 * 2048, 1)), False),
        (Stored("gate", 1, "bfloat16", (128, 768, 2048), (1536 * 2048, 4096, 1)), True),
        (Stored("gate", 1, "bfloat16", (128, 1536, 2044), (1536 * 2044, 2044, 1)), False),
        (Stored("gate", 128, "bfloat16", (1536, 2048), (2048, 1)), False),
    ],
    ids=str,
)
def test_weights_that_a_descriptor_can_hold_are_told_from_others(gate, boxes):
    (task,) = tasks_of(forward_program(QWEN), QWEN.named, [gate], (64,), HOPPER)[1:2]
    assert task.kernel == "gate_up" and all(tile.tma == boxes for tile in task.pool)


def test_tiles_of_few_tokens_are_wide_where_the_weights_are_contiguous():
    """A row of a tile is at least 16 neighbours, as columns of a matrix or along its rows."""
    shape = SHAPES["gpt-oss"]
    turned = [
        Stored("gate", 1, "bfloat16", (32, 2, 2880, 2880), (5760 * 2880, 1, 2, 5760)),
        Stored("down", 1, "bfloat16", (32, 2880, 2880), (2880 * 2880, 1, 2880)),
    ]
    plain = [Stored("gate", 1, "bfloat16", (32, 5760, 2880), (5760 * 2880, 2880, 1))]
    plain.append(Stored("down", 1, "bfloat16", (32, 2880, 2880), (2880 * 2880, 2880, 1)))
    for weights, side in ((turned, "cols"), (plain, "depth")):
        tasks = {t.kernel: t.pool for t in tasks_of(forward_program(shape), shape.named, weights, (1,), HOPPER)}
        for kernel in ("gate_up_few", "down_few"):
            assert len(tasks[kernel]) > 20
            assert all(getattr(tile, side) >= (8 if kernel == "gate_up_few" else 16) for tile in tasks[kernel][:20])


# Real compilations for sm_90.

triton = pytest.importorskip("triton")

from moe_compiler.tuning import compile_worker  # noqa: E402
from moe_compiler.tuning.compile_pool import CompilePool  # noqa: E402
from moe_compiler.tuning.compile_worker import Answer, Job, compile_tile  # noqa: E402

SIZES = BlockSizes(16, 2, 512, 256)


def job(kernel: str, tile, tokens: int = 600, shared: int = HOPPER.shared, sizes: BlockSizes = SIZES) -> Job:
    backward = kernel.startswith("grad_")
    program = backward_program(sizes) if backward else forward_program(sizes)
    tensors = inputs_of(sizes, tokens, weights_of(sizes, "cpu"), "cpu", backward=backward)
    variant = program.variant_for(tokens)
    index = [launch.kernel for launch in variant.launches].index(kernel)
    layouts = tuple((tuple(t.shape), t.stride(), t.dtype) for t in tensors)
    return Job(program.to_text(), (variant.name, index), layouts, str(tile), index > 0, shared, 90)


def sample(kernel: str, tokens: int, count: int):
    found = candidates(Work(kernel, SIZES.named, tokens, True), HOPPER)
    return found[:: max(1, len(found) // count)][:count]


@pytest.mark.parametrize(
    "kernel",
    [
        *("gate_up", "combine", "router_logits"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("down", "grad_pairs", "grad_act", "grad_down")),
    ],
)
def test_a_sample_of_candidates_compiles_within_what_was_reckoned(kernel):
    for tokens in (40, 4096):
        (tile,) = sample(kernel, tokens, 1)
        work, answer = Work(kernel, SIZES.named, tokens, True), compile_tile(job(kernel, tile, tokens))
        assert answer.problem == "", (tokens, tile)
        assert answer.shared <= shared_bytes(work, tile), (tokens, tile)


def test_specialised_warps_take_what_was_reckoned():
    for text in ("128x128x64 w4 s6 g4 tma halves", "128x256x64 w4 s4 g4 tma halves"):
        tile = parse_tile(f"{text} specialised, else 128x256x64 w8 s4 g8 tma halves")
        answer = compile_tile(job("down", tile, 4096))
        assert (
            answer.problem == ""
            and 0 <= shared_bytes(Work("down", SIZES.named, 4096, True), tile) - answer.shared < 256
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "tokens"),
    [(name, tokens) for name in (*sorted(TABLES), "combine") for tokens in (16, 300, 4096)]
    + [("gate_up_few", 2), ("down_few", 2)],
)
def test_a_larger_sample_of_candidates_compiles_within_what_was_reckoned(kernel, tokens):
    for tile in sample(kernel, tokens, 12):
        work, answer = Work(kernel, SIZES.named, tokens, True), compile_tile(job(kernel, tile, tokens))
        assert answer.problem == "", tile
        # The ends of a small tile may take more than its stages do.
        assert answer.shared <= max(shared_bytes(work, tile), 65536 if tile.rows > 1 else 0), tile


def test_a_tile_that_takes_too_much_shared_memory_is_a_problem_that_says_so():
    answer = compile_tile(job("down", "128x128x64 w8 s3 tma", shared=65536))
    assert answer == Answer(f"needs {answer.shared} bytes of shared memory, of 65536", answer.shared)
    assert answer.shared > 65536


def test_a_kernel_that_fails_the_audit_is_a_problem_that_says_so(monkeypatch):
    from moe_compiler.runtime_kernels import audit

    real = audit.audit
    monkeypatch.setattr(audit, "audit", lambda compiled: replace(real(compiled), problems=("no wait",)))
    assert compile_tile(job("down", "32x64x64 w4 s2 tma")).problem == "fails the audit: no wait"


def test_processes_compile_and_answer_and_one_that_dies_is_replaced(monkeypatch):
    good, bad = job("combine", "1x256x1 w2 s3"), job("combine", "1x256x1 w2 s3")
    with CompilePool(1) as pool:
        pool.submit("good", good)
        pool.submit("wrong", replace(bad, launch=("few", 5)))
        pool.submit("no tile", replace(bad, tile="fast"))
        assert pool.answer("good", 120) == Answer("", 0)
        assert "belongs to variant sorted, not to few" in pool.answer("wrong", 60).problem
        assert "TileError" in pool.answer("no tile", 60).problem
        (process,) = pool._processes
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        pool.submit("lost", good)
        assert "the compiling process ended" in pool.answer("lost", 60).problem
        pool.submit("again", good)
        assert pool.answer("again", 120) == Answer("", 0)
        assert len(pool._processes) == 2
    assert all(process.poll() is not None for process in pool._processes)


def test_jobs_that_nobody_has_begun_are_dropped(monkeypatch):
    pool = CompilePool(1)  # not entered: nobody takes jobs
    pool.submit("a", job("combine", "1x256x1 w2 s3"))
    assert pool.answer("a", 0.01) is None
    pool.drop_waiting()
    with pytest.raises(KeyError):
        pool.answer("a", 0.01)


def test_what_a_worker_says_is_read_whole(tmp_path):
    path = tmp_path / "stream"
    with path.open("wb") as stream:
        for value in ("one", Answer("two", 3)):
            compile_worker.send(stream, value)
    with path.open("rb") as stream:
        assert [compile_worker.receive(stream) for _ in range(2)] == ["one", Answer("two", 3)]
        with pytest.raises(EOFError):
            compile_worker.receive(stream)


def test_the_sides_of_every_table_are_known():
    assert set(TABLES) == set(DEPTHS) | set(SIDES) == set(COLUMNS) | set(SIDES)
