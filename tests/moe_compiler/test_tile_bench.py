"""What checks and times tiles, on a CPU: launches run the references; the device's graphs and events are made up."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch

from moe_compiler.block_program import BlockSizes, backward_program, forward_program, inputs_of, weights_of
from moe_compiler.runtime_kernels.registry import Kernel, tiled
from moe_compiler.runtime_kernels.tiles import parse_tile
from moe_compiler.tuning.candidates import HOPPER
from moe_compiler.tuning.command import cases_of
from moe_compiler.tuning.compile_worker import Answer
from moe_compiler.tuning.search import Task
from moe_compiler.tuning.tune_block import tune_on_device
from moe_compiler.tuning.tuned_tiles import with_tiles

pytest.importorskip("triton")

from moe_compiler.runtime_kernels.launching import RefusedKernelWarning
from moe_compiler.tuning.bench import Bench, Block, CudaLaboratory

SIZES = BlockSizes(8, 2, 32, 16)
FAST, SLOW, WRONG, NOT_ALL, REFUSED, FAILING = (parse_tile(f"16x16x16 w4 s{n}") for n in range(1, 7))
OWN_US = 10.0
SPEED = {None: OWN_US, FAST: 8.0, SLOW: 12.0}


class Device:
    """Counts launches by (kernel, tile), and tells times: a graph takes the sum of what its launches take."""

    def __init__(self):
        self.launches: list[tuple[str, object]] = []
        self.captured: list[str] | None = None
        self.now_us = 0.0
        self.captures = 0

    def launch(self, entry: Kernel):
        def run(outs, ins, attrs, *, pdl, tile=None):
            self.launches.append((entry.name, tile))
            if self.captured is not None:
                self.captured.append(SPEED.get(tile, 1.0))
                return
            if tile == FAILING:
                raise RuntimeError("out of resource: shared memory")
            if tile == REFUSED:
                warnings.warn("it never waits", RefusedKernelWarning, stacklevel=2)
            results = entry.reference(**ins, **attrs)
            named = dict(zip(entry.traits.writes, results if isinstance(results, tuple) else (results,), strict=True))
            for name, out in outs.items():
                for to, value in zip(_listed(out), _listed(named[name]), strict=True):
                    if to.numel():
                        to.copy_(value * 1.1 if tile == WRONG else value)
                        if tile == NOT_ALL:
                            to.view(-1)[-1] = float("nan")

        return run


def _listed(value):
    return value if isinstance(value, list) else [value]


@pytest.fixture
def gpu(monkeypatch):
    found = Device()

    class Graph:
        def capture_begin(self, capture_error_mode):
            assert capture_error_mode == "thread_local"
            found.captures += 1
            found.captured = []

        def capture_end(self):
            self.us, found.captured = sum(found.captured), None

        def replay(self):
            found.now_us += self.us

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = found.now_us

        def elapsed_time(self, other):
            return (other.at - self.at) / 1e3

    class Stream:
        def wait_stream(self, other):
            pass

    monkeypatch.setattr(Kernel, "launch", property(found.launch))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return found


def runs(tokens=20, count=3, backward=False, sizes=SIZES):
    torch.manual_seed(0)
    weights = {name: [torch.randn_like(t) * 0.2 for t in many] for name, many in weights_of(sizes, "cpu").items()}

    def one():
        made = inputs_of(sizes, tokens, weights, "cpu", backward=backward)
        if not backward:
            return [torch.randn_like(made[0]), *made[1:]]
        x = torch.randn(tokens, sizes.hidden, dtype=torch.bfloat16)
        first = [x, *inputs_of(sizes, tokens, weights, "cpu")[1:]]
        text = forward_program(sizes, save=True).to_text()
        _, w, preact, perm, starts = torch.ops.moepdl.chain(first, text)
        return [torch.randn_like(x), x, w, preact, perm, starts, *made[6:]]

    return [one() for _ in range(count)]


def test_a_bench_makes_every_launch_with_its_own_tile_first(gpu):
    bench = Bench(forward_program(SIZES).to_text(), runs())
    assert gpu.launches == [(launch.kernel.name, None) for launch in bench.runs.variant.launches] * 3
    assert bench.runs.variant.name == "sorted" and bench.index("down") == 4


@pytest.mark.parametrize(
    ("tile", "told"),
    [
        (FAST, ""),
        (WRONG, "its results differ by 0.1 of their norm"),
        (NOT_ALL, "its results differ by nan of their norm"),
        (REFUSED, "cannot be launched: RefusedKernelWarning: it never waits"),
        (FAILING, "cannot be launched: RuntimeError: out of resource: shared memory"),
    ],
    ids=["right", "wrong", "not all", "refused", "failing"],
)
@pytest.mark.parametrize(("backward", "kernel"), [(False, "gate_up"), (False, "down"), (True, "grad_gate_up")])
def test_a_tile_is_checked_against_the_kernels_own(gpu, tile, told, backward, kernel):
    program = backward_program(SIZES) if backward else forward_program(SIZES)
    bench = Bench(program.to_text(), runs(backward=backward))
    index = bench.index(kernel)
    before = [t.clone() for t in bench.runs.results(index)]
    assert bench.problem(index, tile) == told
    # Whatever it did, the results are those of the kernel's own tile again.
    assert all(torch.equal(a, b) for a, b in zip(before, bench.runs.results(index), strict=True))


def test_times_are_those_of_one_launch_and_the_tiles_take_turns(gpu):
    bench = Bench(forward_program(SIZES).to_text(), runs())
    times = bench.times_us(bench.index("down"), [None, FAST, SLOW, FAST], 4)
    assert times == pytest.approx({None: 10.0, FAST: 8.0, SLOW: 12.0})
    # One to see how often to repeat, then one a tile: 200 us are seven times three launches of 10 us.
    assert gpu.captures == 4
    assert gpu.launches[-21:] == [("down", SLOW)] * 21
    assert bench.times_us(0, [], 3) == {}


class Pool:
    """Answers at once what it is told to."""

    def __init__(self, answers):
        self.jobs, self.answers = {}, answers

    def submit(self, key, job):
        self.jobs.setdefault(key, job)

    def drop_waiting(self):
        self.dropped = True

    def answer(self, key, timeout):
        job = self.jobs[key]
        return self.answers.get(job.tile and parse_tile(job.tile), Answer(""))


def test_the_laboratory_compiles_in_the_pool_and_times_what_is_right(gpu):
    made = []

    def operands(tokens):
        made.append(tokens)
        return runs(tokens)

    def described(tokens):
        return tuple((tuple(t.shape), t.stride(), t.dtype) for t in runs(tokens, 1)[0])

    text = forward_program(SIZES).to_text()
    too_large = parse_tile("128x128x128 w8 s8")
    late = parse_tile("64x64x64 w4 s4")
    pool = Pool({too_large: Answer("needs 999999 bytes of shared memory, of 232448"), late: None})
    lab = CudaLaboratory(Block(text, described, operands), pool, 232448)
    lab.warm((20, 40))
    # The variant of these T has six launches, each of which is compiled with its own tile first.
    assert len(pool.jobs) == 12 and all(job.tile is None for job in pool.jobs.values())
    first, other = Task("down", 20, ()), Task("down", 40, ())
    tiles = [FAST, SLOW, WRONG, too_large, late]
    lab.prepare(first, tiles)
    lab.prepare(other, tiles)
    assert len(pool.jobs) == 12 + len(tiles)  # T is no part of what is compiled
    job = next(job for job in pool.jobs.values() if job.tile == str(FAST))
    assert job.launch == ("sorted", 4) and job.pdl and job.arch is None and job.tensors[0][0] == (20, SIZES.hidden)
    good, dropped = lab.ready(first, tiles, until=0.0)
    assert good == [FAST, SLOW]
    assert dropped == {
        WRONG: "its results differ by 0.1 of their norm",
        too_large: "needs 999999 bytes of shared memory, of 232448",
    }
    assert lab.times_us(first, [None, *good], 3) == pytest.approx({None: 10.0, FAST: 8.0, SLOW: 12.0})
    assert made == [20]
    lab.times_us(other, [FAST], 3)
    assert made == [20, 40]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_block_is_tuned_from_its_sizes_to_its_points(gpu, monkeypatch, backward):
    sizes = BlockSizes(8, 2, 128, 64)
    (case,) = (case for case in cases_of(sizes, train=True) if case.backward == backward and "saving" not in case.block)
    weights = weights_of(sizes, "cpu")
    weights = {name: [torch.randn_like(t) * 0.2 for t in many] for name, many in weights.items()}
    asked = []

    def described(tokens):
        made = inputs_of(sizes, tokens, weights_of(sizes, "cpu"), "cpu", backward=backward)
        return tuple((tuple(t.shape), t.stride(), t.dtype) for t in made)

    def operands(tokens):
        return runs(tokens, 2, backward, sizes)

    def chain_times(given, texts, rounds):
        asked.append((given[0][0].shape[0], sorted(texts)))
        return {way: [40.0 if way == "after" else 50.0] * rounds for way in texts}

    monkeypatch.setattr("moe_compiler.tuning.tune_block.limits_of", lambda: HOPPER)
    monkeypatch.setattr("moe_compiler.edge_timing.interleaved_us", chain_times)
    pool, told = Pool({}), []
    found = tune_on_device(
        case.program,
        case.block,
        sizes.named,
        case.weights,
        described,
        operands,
        (1, 20),
        budget_s=8.0,
        pool=pool,
        say=told.append,
    )
    assert pool.dropped and told[-1] == "the whole chain, T=20"
    assert asked == [(1, ["after", "before"]), (20, ["after", "before"])]
    assert found.chain_us == {1: (50.0, 40.0), 20: (50.0, 40.0)} and not found.dropped
    # Any other tile takes a tenth of the time of a kernel's own here, so each kernel that had a turn has another one.
    first = "grad_act" if backward else "gate_up_few"
    assert found.points[first][1] is not None
    names = {launch.kernel for variant in case.program.variants for launch in variant.launches}
    assert set(found.points) == names & set(tiled())
    text = with_tiles(case.program, found.points, 0.25).to_text()
    assert str(found.points[first][1]) in text
