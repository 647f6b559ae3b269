"""The search for tiles with a made-up laboratory, what a chain gains by it, and how a compile comes by its tiles."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field

import pytest
import torch

from moe_compiler import cli, device, inductor
from moe_compiler.block_program import BlockSizes, forward_program
from moe_compiler.errors import OptionError, UsageError
from moe_compiler.passes.chain_pdl import chain_pdl
from moe_compiler.passes.expand_stages import expand_stages
from moe_compiler.pipeline import run_passes
from moe_compiler.runtime_kernels.registry import tiled
from moe_compiler.runtime_kernels.tiles import parse_tile
from moe_compiler.tuning import tune_chain
from moe_compiler.tuning.candidates import HOPPER, Work, candidates
from moe_compiler.tuning.command import cases_of, record, report_lines, sizes_of
from moe_compiler.tuning.search import Task, search
from moe_compiler.tuning.tile_table import look_up, table_path, write_row
from moe_compiler.tuning.tune_block import LADDER, Tuning, tasks_of, tune_block
from moe_compiler.tuning.tuned_tiles import missing, plain
from tests.moe_compiler.graphs import E, H, I, K, backward_graph, context, forward_graph

QWEN = BlockSizes(128, 8, 2048, 768)
SMALL = parse_tile("16x64x64 w4 s3 tma")


def task(kernel="gate_up", tokens=512) -> Task:
    return Task(kernel, tokens, tuple(candidates(Work(kernel, QWEN.named, tokens, True), HOPPER)))


@dataclass
class Laboratory:
    """Every tile takes the time that `speed` says, with 1 % of noise. A tile compiles in `compile_s`, by its clock."""

    speed: dict
    own_us: float = 100.0
    compile_s: float = 0.5
    broken: dict = field(default_factory=dict)
    now: float = 0.0
    timed: list = field(default_factory=list)
    compiled: list = field(default_factory=list)
    noise: random.Random = field(default_factory=lambda: random.Random(0))

    def clock(self):
        return self.now

    def prepare(self, task, tiles):
        pass

    def ready(self, task, tiles, until):
        good = []
        for tile in tiles:
            if (task.kernel, tile) not in self.compiled:
                if self.now + self.compile_s > until:
                    break
                self.now += self.compile_s
                self.compiled.append((task.kernel, tile))
            good.append(tile)
        return [t for t in good if t not in self.broken], {t: self.broken[t] for t in good if t in self.broken}

    def times_us(self, task, tiles, rounds):
        self.now += 0.01 * len(tiles)
        self.timed.append((task, tuple(tiles), rounds))
        return {t: (self.own_us if t is None else self.speed[t]) * self.noise.uniform(0.995, 1.005) for t in tiles}


def hill(pool, best, step=0.03):
    """Times that grow with the distance from `best`, in steps of its fields."""
    flags, sizes = ("group", "swap", "halves", "registers"), ("rows", "cols", "depth", "warps")

    def apart(tile):
        steps = sum(getattr(tile, name) != getattr(best, name) for name in flags) + abs(tile.stages - best.stages)
        return steps + sum(abs(math.log2(getattr(tile, name) / getattr(best, name))) for name in sizes)

    return {tile: 80.0 * (1 + step * apart(tile)) for tile in pool}


def test_the_best_tile_is_found_though_it_is_far_down_the_list():
    one = task()
    best = one.pool[len(one.pool) * 2 // 3]
    lab = Laboratory(hill(one.pool, best))
    found, stopped = search([one], lab, until=1e9, clock=lab.clock)
    assert found[one].best_us <= 80.0 * 1.04 and found[one].own_us == pytest.approx(100, rel=0.01)
    assert found[one].tried < len(one.pool) / 2 and not stopped


def test_halving_spends_most_rounds_on_the_fastest():
    one = task()
    lab = Laboratory(hill(one.pool, one.pool[3]))
    search([one], lab, until=1e9, clock=lab.clock)
    first = [(len(tiles), rounds) for _, tiles, rounds in lab.timed[:3]]
    assert first == [(8, 3), (4, 6), (3, 15)]
    slowest = max(lab.timed[0][1], key=lab.speed.__getitem__)
    assert slowest not in lab.timed[1][1] and None in lab.timed[2][1]


def test_the_search_ends_with_its_time_and_every_task_has_had_a_turn():
    tasks = [task("gate_up", 64), task("down", 64), task("gate_up", 4096)]
    speed = {tile: 90.0 for one in tasks for tile in one.pool}
    lab = Laboratory(speed)
    found, stopped = search(tasks, lab, until=15.0, clock=lab.clock)
    assert stopped and lab.now <= 15.5
    assert all(found[one].tried >= 8 and found[one].best is not None for one in tasks)


def test_without_time_nothing_is_found_and_nothing_is_claimed():
    one = task()
    lab = Laboratory(dict.fromkeys(one.pool, 1.0))
    found, stopped = search([one], lab, until=0.0, clock=lab.clock)
    assert stopped and found[one].best is None and found[one].own_us == 0.0


def test_a_tile_that_is_not_clearly_faster_than_the_kernels_own_is_not_taken():
    one = task()
    lab = Laboratory(dict.fromkeys(one.pool, 99.0))
    found, _ = search([one], lab, until=1e9, clock=lab.clock)
    assert found[one].best is None and found[one].best_us == found[one].own_us
    # Three turns that brought nothing were enough.
    assert found[one].tried == 24


def test_tiles_that_cannot_be_used_are_dropped_and_named():
    one = task()
    broken = {one.pool[0]: "fails the audit: no wait", one.pool[2]: "its results differ by 0.3 of their norm"}
    lab = Laboratory(hill(one.pool, one.pool[0]), broken=broken)
    found, _ = search([one], lab, until=1e9, clock=lab.clock)
    assert broken.items() <= found[one].dropped.items()
    assert found[one].best not in broken
    assert not any(tile in broken for _, tiles, _ in lab.timed for tile in tiles)


def test_kernels_of_several_numbers_of_tokens_share_what_was_compiled():
    tasks = [task("gate_up", 64), task("gate_up", 96)]
    lab = Laboratory({tile: 90.0 for one in tasks for tile in one.pool})
    found, _ = search(tasks, lab, until=20.0, clock=lab.clock)
    tried = [outcome.tried for outcome in found.values()]
    assert min(tried) >= 8 and len(lab.compiled) < 0.75 * sum(tried)


def test_an_interrupt_keeps_what_was_found():
    one = task()
    lab = Laboratory(dict.fromkeys(one.pool, 50.0))

    def say(text):
        if "turn 2" in text:
            raise KeyboardInterrupt

    found, stopped = search([one], lab, until=1e9, clock=lab.clock, say=say)
    assert stopped and found[one].best is not None and found[one].tried == 8


# A whole block.


def tuning(chain_times, own_us=100.0, tokens=(1, 64), budget_s=1e6) -> Tuning:
    program = forward_program(QWEN)
    (case,) = cases_of(QWEN)
    tasks = tasks_of(program, QWEN.named, case.weights, tokens, HOPPER)
    lab = Laboratory({tile: 90.0 for one in tasks for tile in one.pool}, own_us=own_us)
    share = QWEN.k / QWEN.experts
    ways = {"rows_a_token": share, "budget_s": budget_s, "clock": lab.clock}
    return tune_block(program, case.block, tokens, tasks, lab, chain_times, **ways)


def test_every_tiled_kernel_of_each_variant_is_a_task():
    (case,) = cases_of(QWEN)
    tasks = tasks_of(case.program, QWEN.named, case.weights, (1, 64, 8192), HOPPER)
    assert [str(one) for one in tasks] == [
        *("router_logits, T=1", "gate_up_few, T=1", "down_few, T=1"),
        *(f"{name}, T={t}" for t in (64, 8192) for name in ("router_logits", "gate_up", "down", "combine")),
    ]
    forward, saving, backward = cases_of(QWEN, train=True)
    names = {one.kernel for one in tasks_of(backward.program, QWEN.named, backward.weights, (4096,), HOPPER)}
    assert names == {"grad_act", "grad_down", "grad_gate_up", "grad_pairs", "combine"}
    assert len({forward.block, saving.block, backward.block}) == 3


def test_a_chain_that_gains_keeps_its_tiles_and_one_that_does_not_keeps_the_kernels_own():
    asked = {}

    def chain_times(tokens, texts):
        asked[tokens] = texts
        return {"before": [50.0, 52.0, 51.0], "after": [40.0, 41.0, 45.0] if tokens == 64 else [51.5, 51.0, 53.0]}

    found = tuning(chain_times)
    assert found.chain_us == {1: (51.0, 51.0), 64: (51.0, 41.0)}
    assert all(tile is None for points in found.points.values() for t, tile in points.items() if t == 1)
    assert all(points[64] is not None for name, points in found.points.items() if 64 in points)
    assert '"tiles"' not in asked[64]["before"] and '"tiles"' in asked[64]["after"]
    assert found.complete and found.tried > 0


def test_a_chain_whose_kernels_keep_their_tiles_is_timed_once():
    def chain_times(tokens, texts):
        assert list(texts) == ["before"]
        return {"before": [50.0]}

    found = tuning(chain_times, own_us=85.0)
    assert found.chain_us == {1: (50.0, 50.0), 64: (50.0, 50.0)}


def test_a_kernel_that_had_no_turn_keeps_its_own_tile_and_is_not_asked_again():
    found = tuning(lambda tokens, texts: {"before": [50.0]}, budget_s=0.0)
    assert not found.complete and found.tried == 0
    names = {1: {"router_logits", "gate_up_few", "down_few"}, 64: {"router_logits", "gate_up", "down", "combine"}}
    assert {t: {n for n, at in found.points.items() if t in at} for t in (1, 64)} == names
    assert all(tile is None for at in found.points.values() for tile in at.values())


def test_what_was_found_is_told_with_a_line_to_paste():
    found = tuning(lambda tokens, texts: {"before": [50.0], "after": [40.0]})
    lines = report_lines([found], table_path("NVIDIA H200"))
    assert lines[0] == found.block and "40.0  0.800  combine 1x" in lines[3]
    options = lines[-1].removeprefix("to fix it: options=")
    assert context(**json.loads(options)).options.tiles == {found.block: found.points}
    data = record(found)
    assert json.loads(json.dumps(data)) == data and data["chain_us"]["64"] == [50.0, 40.0]
    nothing = tuning(lambda tokens, texts: {"before": [50.0]}, own_us=85.0)
    assert report_lines([nothing], table_path("x"))[-1] == (
        "no tile was faster than the kernels' own: there is nothing to paste"
    )


def test_the_ladder_serves_every_number_of_tokens_up_to_its_end():
    points = {"down": dict.fromkeys(LADDER)}
    assert missing(points, "down", range(1, 2 * LADDER[-1] + 1)) == []


@pytest.mark.parametrize(
    "text", ["128,8,2048", "128,8,2048,768,2,2", "a,8,2048,768", "128,8,2048,0", "4,8,64,64", "gpt-oss-20b", "qwen4"]
)
def test_a_shape_that_is_none(text):
    with pytest.raises(UsageError, match=text):
        sizes_of(text)
    assert cli.main(["tune", "--shape", text]) == cli.MISUSED


def test_there_is_nothing_to_tune_for_without_a_gpu(capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert cli.main(["tune", "--shape", "8,2,128,64"]) == cli.FAILED
    assert "nothing was tuned: there is no CUDA device to tune for" in capsys.readouterr().err
    assert cli.main(["tune", "--shape", "8,2,128,64", "--tokens", "0"]) == cli.MISUSED


# A compile.

BLOCK = f"E{E} k{K} H{H} I{I} N{2 * I} bfloat16 silu gate=rows down=rows"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """The compiler's view of a machine with an H200, and the searches that were made on it."""
    monkeypatch.setenv("MOEPDL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(device, "why_no_pdl", lambda kind: "" if kind == "cuda" else f"the block runs on {kind}")
    monkeypatch.setattr(device, "cost_model", lambda kind: None)
    searches = []

    def tune_on_device(program, block, sizes, weights, described, operands, tokens, *, budget_s, pool, say):
        layouts = described(tokens[0])
        searches.append((block, tuple(tokens), budget_s, layouts, program))
        say("searching")
        points = {"down": dict.fromkeys(tokens, SMALL), **{n: dict.fromkeys(tokens) for n in tiled() if n != "down"}}
        return Tuning(block, points, {}, (), 1.0, True)

    monkeypatch.setattr(tune_chain, "tune_on_device", tune_on_device)
    monkeypatch.setattr("moe_compiler.edge_timing.times_us", lambda chain, tokens, texts: {w: [1.0] for w in texts})
    return searches


def compiled(module=None, phase="forward", **options):
    ctx = context(phase, **options)
    run_passes(forward_graph(300) if module is None else module, (expand_stages, chain_pdl), ctx)
    (chain,) = ctx.chains
    return ctx.report, {
        (variant.name, launch.kernel): launch.tiles for variant in chain.program.variants for launch in variant.launches
    }


def test_full_searches_once_and_the_table_serves_from_then_on(machine):
    report, tiles = compiled(tune="full", tune_budget_s=7)
    assert report.tiles == "tuned on NVIDIA H200"
    ((block, tokens, budget, layouts, program),) = machine
    assert (block, tokens, budget) == (BLOCK, (300,), 7)
    assert layouts[0] == ((300, E), (E, 1), torch.bfloat16)
    assert [launch.pdl for launch in program.variants[1].launches] == [False, True, True, True, True]
    assert tiles["sorted", "down"] == ((149, None), (600, str(SMALL)), (None, None)) and not tiles["sorted", "gate_up"]
    for tune in ("full", "cached"):
        again, same = compiled(tune=tune)
        assert same == tiles and again.tiles == report.tiles
    assert len(machine) == 1
    launches = {launch.kernel: launch for launch in report.schedule[0].variants[1].launches}
    assert launches["down"].tiles == {"T <= 149": "own", "T <= 600": str(SMALL), "any T": "own"}
    assert "Piecewise" in launches["down"].cost["grid"] and launches["gate_up"].tiles == {}


def test_another_number_of_tokens_is_searched_for_itself_and_the_rows_are_one(machine):
    compiled(tune="full")
    compiled(forward_graph(4096), tune="full")
    assert [tokens for _, tokens, *_ in machine] == [(300,), (4096,)]
    assert look_up("NVIDIA H200", BLOCK)[0]["down"] == {300: SMALL, 4096: SMALL}
    compiled(forward_graph(200), tune="full")
    assert len(machine) == 2


def test_a_backward_chain_and_one_that_saves_have_rows_of_their_own(machine):
    compiled(backward_graph(tokens=300), "backward", tune="full")
    assert machine[0][0] == f"{BLOCK} backward"


def test_cached_never_searches_and_off_does_not_look(machine):
    report, tiles = compiled()
    assert report.tiles == "not tuned: this block is not in the table; `moepdl tune` adds it"
    write_row(table_path("NVIDIA H200"), "NVIDIA H200", BLOCK, {"down": {300: SMALL}})
    assert compiled()[1]["sorted", "down"] and not any(tiles.values())
    report, tiles = compiled(tune="off")
    assert report.tiles == 'not tuned: options["tune"] is "off"' and not any(tiles.values())
    assert not machine


def test_tiles_that_are_given_count_before_tuned_ones(machine, tmp_path):
    write_row(table_path("NVIDIA H200"), "NVIDIA H200", BLOCK, {"down": {300: SMALL}})
    given = {BLOCK: {"gate_up": {"300": "64x64x32 w4 s3"}}}
    for value in (given, str(tmp_path / "own.json")):
        write_row(tmp_path / "own.json", "any", BLOCK, {"gate_up": {300: parse_tile("64x64x32 w4 s3")}})
        report, tiles = compiled(tiles=value, tune="off")
        assert report.tiles == 'given by options["tiles"]'
        assert tiles["sorted", "gate_up"][1] == (600, "64x64x32 w4 s3") and not tiles["sorted", "down"]
    other = {BLOCK.replace("E8", "E9"): given[BLOCK]}
    assert compiled(tiles=other)[0].tiles == "tuned on NVIDIA H200"


def test_on_a_cpu_there_are_no_tiles():
    ctx = context()
    run_passes(forward_graph(4, device="cpu"), (expand_stages, chain_pdl), ctx)
    assert ctx.report.tiles == "" and not any(
        launch.tiles for v in ctx.chains[0].program.variants for launch in v.launches
    )


def test_a_block_of_a_model_is_the_block_that_the_command_tunes(machine):
    compiled(tune="full")
    (case,) = cases_of(BlockSizes(E, K, H, I))
    assert case.block == machine[0][0] == BLOCK


def test_another_table_is_another_key_of_compiled_code(machine, monkeypatch):
    monkeypatch.setattr(inductor, "describe", lambda: {"device": "NVIDIA H200"})
    keys = [inductor.device_key()]
    write_row(table_path("NVIDIA H200"), "NVIDIA H200", BLOCK, {"down": {300: SMALL}})
    keys.append(inductor.device_key())
    write_row(table_path("NVIDIA H200"), "NVIDIA H200", BLOCK, {"down": {300: None}})
    keys.append(inductor.device_key())
    assert len(set(keys)) == 3
    options = [context(tiles=tiles).options.cache_key() for tiles in ({}, {BLOCK: {"down": {4: str(SMALL)}}})]
    assert options[0] != options[1]
    assert context(tune_budget_s=5).options.cache_key() == options[0]


def test_tiles_in_the_options_are_checked(monkeypatch, tmp_path):
    assert context(tiles={BLOCK: {"down": {"4": str(SMALL)}}}).options.changed()["tiles"] == {
        BLOCK: {"down": {"4": str(SMALL)}}
    }
    for value, told in (
        ({BLOCK: {"down": {"4": "fast"}}}, "kernel 'down', T=4: tile 'fast'"),
        (str(tmp_path / "none.json"), "No such file"),
        (3, "tiles are a dict of blocks, not int"),
    ):
        with pytest.raises(OptionError, match=r'options\["tiles"\]') as caught:
            context(tiles=value)
        assert told in str(caught.value) and "moepdl tune" in caught.value.try_
    monkeypatch.setenv("MOEPDL_TILES", json.dumps({BLOCK: {"down": {"4": str(SMALL)}}}))
    assert plain(context().options.tiles) == {BLOCK: {"down": {"4": str(SMALL)}}}
    monkeypatch.setenv("MOEPDL_TILES", "{")
    with pytest.raises(OptionError, match="MOEPDL_TILES"):
        context()
    monkeypatch.delenv("MOEPDL_TILES")
    for value in (0, -1, "soon", True, float("inf")):
        with pytest.raises(OptionError, match="tune_budget_s"):
            context(tune_budget_s=value)
    monkeypatch.setenv("MOEPDL_TUNE_BUDGET_S", "2.5")
    assert context().options.tune_budget_s == 2.5
