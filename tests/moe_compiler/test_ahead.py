"""Kernels compiled ahead: a recorded launch travels to another process and compiles to the same there."""

from __future__ import annotations

import pickle

import pytest
import torch

pytest.importorskip("triton", reason="kernels are compiled by triton")

from moe_compiler.ahead import Ahead, Job, job_of, start_of
from moe_compiler.block_program import BlockSizes, forward_program, inputs_of, weights_of
from moe_compiler.runtime_kernels import launching
from moe_compiler.runtime_kernels.audit import compile_offline
from moe_compiler.runtime_kernels.chain import launcher
from moe_compiler.runtime_kernels.launching import Start
from moe_compiler.runtime_kernels.tiles import TABLES
from tests.runtime_kernels.recorded import DEVICE_KERNELS, TILES, operands, record, record_on


def travelled(start: Start) -> Start:
    return start_of(pickle.loads(pickle.dumps(job_of(start))))


@pytest.mark.parametrize("name", DEVICE_KERNELS)
def test_every_launch_travels(name: str) -> None:
    for start in record(name, True):
        arrived = travelled(start)
        assert arrived.kernel is start.kernel
        assert job_of(arrived) == job_of(start)
        assert arrived.constants == start.constants and arrived.pdl


@pytest.mark.parametrize("tile", ["default", "tma"])
def test_what_arrives_compiles_to_the_same(tile: str) -> None:
    (start,) = record("gate_up", True, tile=TILES[tile])
    assert compile_offline(travelled(start)).hash == compile_offline(start).hash


def test_a_kernel_with_specialised_warps_travels_too() -> None:
    given = operands(hidden=256, inner=256)
    (start,) = record_on(given, "down", True, given["x"].dtype, tile=TABLES["down"].hopper[-1][1])
    assert "specialised" in start.kernel.__name__
    assert compile_offline(travelled(start)).hash == compile_offline(start).hash


def test_an_operand_that_is_not_aligned_stays_so() -> None:
    (start,) = record("combine", False)
    odd = torch.empty(33, dtype=torch.bfloat16)[1:]
    moved = Start(start.kernel, 1, (odd, *start.operands[1:]), *list(vars(start).values())[3:])
    assert travelled(moved).operands[0].data_ptr() % 16
    assert job_of(moved) != job_of(start)


def test_the_numbers_of_a_launch_are_no_part_of_its_kernel() -> None:
    (start,) = record("gate_up", True)
    other = Start(start.kernel, 7, start.operands, tuple(n + 1 for n in start.numbers), *list(vars(start).values())[4:])
    assert job_of(other) == job_of(start)


def test_nor_is_the_shape_behind_a_descriptor() -> None:
    (start,) = record("gate_up", True, tile=TILES["tma"])
    (other,) = record_on(operands(inner=256), "gate_up", True, torch.bfloat16, tile=TILES["tma"])
    at = next(i for i, operand in enumerate(start.operands) if hasattr(operand, "block_shape"))
    assert start.operands[at].shape != other.operands[at].shape
    assert job_of(start).operands[at].descriptor[1]["shape"] == list(start.operands[at].block_shape)
    assert compile_offline(travelled(start)).hash == compile_offline(start).hash


class Pool:
    """A pool that runs nothing and remembers what it was given."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def submit(self, function, job):
        self.jobs.append(job)
        return self

    def exception(self):
        return None


def test_each_kernel_is_compiled_once_and_an_error_stops_nothing() -> None:
    ahead, pool = Ahead(workers=2), Pool()
    ahead._pool = pool

    def failing() -> None:
        raise torch.OutOfMemoryError("no memory for this one")

    sizes = BlockSizes(8, 2, 64, 32)
    weights = weights_of(sizes, "cpu")

    def call() -> None:
        launcher.run(inputs_of(sizes, 4, weights, "cpu"), forward_program(sizes).to_text())

    assert ahead.compile([failing, call, call]) == len(pool.jobs) >= 3
    names = [job.kernel[1] for job in pool.jobs]
    assert len(names) == len(set(names))
    assert not launching.is_recording()


def test_recorded_chains_hand_on_valid_ids() -> None:
    """What was not computed must not send whatever comes after the chain out of bounds."""
    sizes = BlockSizes(8, 2, 64, 32)
    tensors = inputs_of(sizes, 64, weights_of(sizes, "cpu"), "cpu")
    text = forward_program(sizes, save=True).to_text()
    for _ in range(3):  # fresh memory is often zero by chance
        torch.full((1 << 16,), 7, dtype=torch.int32)
        with launching.recording():
            _, _, _, perm, starts = launcher.run(tensors, text)
        assert perm.dtype == starts.dtype == torch.int32
        assert not perm.any() and not starts.any()


def test_without_workers_nothing_is_done() -> None:
    assert Ahead(workers=1).compile([lambda: 1 / 0]) == 0
