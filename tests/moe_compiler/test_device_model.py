"""Predicted times: the formula, the fit, where a table comes from, and the shipped one against measurements."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_compiler import device, device_model
from moe_compiler.block_program import BlockSizes, backward_program, forward_program, inputs_of, weights_of
from moe_compiler.calibrate import Point, calibrate, fit, fit_kernel
from moe_compiler.cost import T, load_cost, stage_cost
from moe_compiler.device_model import DeviceModel, KernelModel, calibration_path, load, save
from moe_compiler.passes.chain_pdl import chain_pdl
from moe_compiler.passes.expand_stages import expand_stages
from moe_compiler.pipeline import run_passes
from moe_compiler.runtime_kernels.registry import kernel, names
from moe_compiler.runtime_kernels.tiles import TABLES
from moe_compiler.viz.dot import dags_text
from tests.moe_compiler.graphs import E, H, I, K, context, forward_graph

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
QWEN = BlockSizes(128, 8, 2048, 768)


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    """No calibration of the machine is seen."""
    monkeypatch.setenv("MOEPDL_CACHE_DIR", str(tmp_path))
    device_model.device_model.cache_clear()
    yield tmp_path
    device_model.device_model.cache_clear()


@pytest.fixture
def h200(own_cache) -> DeviceModel:
    return device_model.device_model("NVIDIA H200")


def test_a_kernel_takes_the_larger_of_memory_and_arithmetic_rounded_where_they_meet():
    model = KernelModel(fixed_us=2.0, bytes_per_us=4e6, work_per_us=6e8, sharpness=3.0)
    assert model.time_us(0, 0) == 2.0
    assert model.time_us(4e9, 0) == pytest.approx(1002)
    assert model.time_us(0, 6e11) == pytest.approx(1002)
    assert model.time_us(4e8, 6e10) == pytest.approx(2 + 100 * 2 ** (1 / 3))
    assert KernelModel(1.0, 4e6).time_us(4e8, 1e12) == pytest.approx(101)


@pytest.mark.parametrize("truth", [KernelModel(2.0, 4.1e6, 6.2e8, 2.8), KernelModel(5.0, 3.5e6, 4.0e8, 4.0)], ids=str)
def test_the_fit_finds_the_numbers_that_made_the_times(truth):
    moved = [1e6, 1e7, 1e8, 4e8, 8e8, 8e8, 9e8, 1e9, 1.1e9]
    work = [1e6, 1e7, 1e9, 1e10, 4e10, 1e11, 2e11, 5e11, 1e12]
    us = [truth.time_us(m, w) for m, w in zip(moved, work, strict=True)]
    found = fit_kernel(moved, work, us)
    for m, w, t in zip(moved, work, us, strict=True):
        assert found.time_us(m, w) == pytest.approx(t, rel=0.05)
    assert found.bytes_per_us == pytest.approx(truth.bytes_per_us, rel=0.1)
    assert found.work_per_us == pytest.approx(truth.work_per_us, rel=0.1)


def test_a_table_is_kept_and_read_back(tmp_path):
    points = [Point("combine", QWEN.named, tokens, 1.5 + tokens * 0.01) for tokens in (1, 100, 1000)]
    model = fit(points, "Some GPU 3", 0.4, {"torch": "2.11"})
    save(model, tmp_path / "x" / "some.json")
    again = load(tmp_path / "x" / "some.json", "calibrated")
    assert again.device == "Some GPU 3" and again.boundary_us == 0.4 and dict(again.about) == {"torch": "2.11"}
    for tokens in (1, 100, 1000):
        assert again.time_us("combine", QWEN.named, tokens) == pytest.approx(
            model.time_us("combine", QWEN.named, tokens), rel=1e-3
        )


@pytest.mark.parametrize(
    "text", ["", "[]", '{"device": "x"}', '{"device": "x", "boundary_us": 1, "kernels": {"a": {"b": 1}}}']
)
def test_a_file_that_is_no_table_is_named(tmp_path, text):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"broken\.json is no table of a device .*moepdl calibrate"):
        load(path, "calibrated")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fixed_us", "fast"),
        ("bytes_per_us", None),
        ("bytes_per_us", 0),
        ("sharpness", 0),
        ("work_per_us", -5),
        ("fixed_us", float("nan")),
        ("boundary_us", float("nan")),
        ("boundary_us", "much"),
    ],
)
def test_a_table_with_a_value_that_cannot_be_is_refused(tmp_path, key, value):
    kernel_values = {"fixed_us": 1.0, "bytes_per_us": 4e6, "work_per_us": 0.0, "sharpness": 3.0}
    data = {"device": "x", "boundary_us": 0.5, "kernels": {"combine": kernel_values}}
    path = tmp_path / "table.json"
    path.write_text(json.dumps(data))
    assert load(path, "calibrated").kernels["combine"].bytes_per_us == 4e6
    (data if key in data else kernel_values)[key] = value
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=rf"table\.json is no table.*{key}"):
        load(path, "calibrated")


def test_the_user_s_calibration_wins_over_the_shipped_table_and_that_over_a_derived_one(own_cache):
    shipped = device_model.device_model("NVIDIA H200")
    assert shipped.source == shipped.label == "shipped"
    other = device_model.device_model("NVIDIA H100 PCIe", 0.4, 0.7)
    assert other.source == "derived from NVIDIA H200: 0.40 x bandwidth, 0.70 x arithmetic"
    for name, own in shipped.kernels.items():
        assert other.kernels[name].bytes_per_us == pytest.approx(0.4 * own.bytes_per_us)
        assert other.kernels[name].work_per_us == pytest.approx(0.7 * own.work_per_us)
    save(replace(shipped, boundary_us=0.7), calibration_path("NVIDIA H200"))
    device_model.device_model.cache_clear()
    own = device_model.device_model("NVIDIA H200")
    assert own.source == "calibrated" and own.boundary_us == 0.7
    assert own.label.startswith("calibrated (") and own.label != replace(own, boundary_us=0.6).label


def test_every_kernel_of_a_block_has_a_time_and_others_have_none(h200):
    used = {
        launch.kernel
        for program in (forward_program(QWEN), backward_program(QWEN))
        for variant in program.variants
        for launch in variant.launches
    }
    for name in used:
        assert h200.time_us(name, QWEN.named, 100) > 0, name
    assert used <= set(names())
    assert h200.time_us("gate_up", replace(QWEN, dtype=torch.float32).named, 100) is None
    assert h200.time_us("gate_up", {"k": 8, "w": 2}, 100) is None
    assert h200.time_us("experts_loop", QWEN.named, 100) is None
    assert h200.chain_us(["route", "experts_loop"], 0, QWEN.named, 8) is None
    assert h200.time_us("gate_up", QWEN.named, 0) == h200.kernels["gate_up"].fixed_us


def test_shipped_predictions_are_within_15_percent_of_what_was_measured(h200):
    """The rows are chains of models that no calibration saw, on an H200 (benchmarks/predictions.py)."""
    sizes = {
        "gpt-oss-20b": BlockSizes(32, 4, 2880, 2880),
        "OLMoE-1B-7B": BlockSizes(64, 8, 2048, 1024),
        "DeepSeek-V3": BlockSizes(256, 8, 7168, 2048),
    }
    rows = json.loads((RESULTS / "predictions.json").read_text())["rows"]
    seen = set()
    for row in rows:
        if row["model"] in sizes:
            kernels = row["kernels"].split(", ")
            predicted = h200.chain_us(kernels, row["programmatic"], sizes[row["model"]].named, row["T"])
            assert predicted == pytest.approx(row["measured us"], rel=0.15), row
            seen.add((row["model"], row["T"]))
    assert len(seen) == 3 * 5


@pytest.mark.parametrize("backward", [False, True])
def test_the_program_of_a_block_is_what_its_operands_fit(backward):
    """On a CPU the references run the stages of the large-T variant, and check every declared shape."""
    sizes = BlockSizes(8, 2, 16, 8, torch.float32)
    weights = {name: [torch.randn_like(t) for t in held] for name, held in weights_of(sizes, "cpu").items()}
    program = (backward_program if backward else forward_program)(sizes)
    if not backward:
        operands = [torch.randn(9, 16), *inputs_of(sizes, 9, weights, "cpu")[1:]]
    else:
        x = torch.randn(9, 16)
        operands = [x, *inputs_of(sizes, 9, weights, "cpu")[1:]]
        saved = torch.ops.moepdl.chain(operands, forward_program(sizes, save=True).to_text())
        operands = [torch.randn(9, 16), x, *saved[1:], *weights["gate"], *weights["down"]]
        shapes = [t.shape for t in inputs_of(sizes, 9, weights, "cpu", backward=True)]
        assert [t.shape for t in operands] == shapes
    found = torch.ops.moepdl.chain(operands, program.to_text())
    assert all(torch.isfinite(t).all() for t in found)
    assert all(kernel(launch.kernel).traits.waits for v in program.variants for launch in v.launches if launch.pdl)


def chained(monkeypatch, model, tokens=4, **options):
    monkeypatch.setattr(device, "why_no_pdl", lambda kind: "" if kind == "cuda" else f"the block runs on {kind}")
    monkeypatch.setattr(device, "cost_model", lambda kind: model if kind == "cuda" else None)
    ctx = context(**options)
    run_passes(forward_graph(tokens), (expand_stages, chain_pdl), ctx)
    return ctx.report


def test_a_report_tells_predicted_times_and_gains(monkeypatch, h200):
    report = chained(monkeypatch, h200)
    (chain,) = report.schedule
    assert report.predictions == "NVIDIA H200, shipped"
    by_name = {variant.name: variant for variant in chain.variants}
    # Four tokens are constant here and belong to the second variant; the others are told at the end of their range.
    assert [by_name[name].at_tokens for name in ("few", "sorted", "blocked")] == [1, 4, 4096]
    for variant in chain.variants:
        assert all(launch.predicted_us > 0 for launch in variant.launches)
        total = sum(launch.predicted_us for launch in variant.launches)
        assert variant.predicted_us == pytest.approx(total - variant.programmatic * h200.boundary_us)
        for edge in variant.edges:
            assert edge.predicted_us == (h200.boundary_us if edge.producer == edge.consumer - 1 else None)
        for launch in variant.launches:
            assert {"bytes", "flops"} <= launch.cost.keys() and ("grid" in launch.cost) == (launch.kernel in TABLES)
    sizes = {"k": K, "E": E, "H": H, "I": I, "N": 2 * I, "w": 2}
    assert by_name["few"].launches[1].cost["flops"] == str(stage_cost("gate_up_few", sizes).flops)
    assert "us predicted at T=4096" in str(report)


def test_auto_launches_programmatically_only_what_is_predicted_to_gain(monkeypatch, h200):
    gains_nothing = replace(h200, boundary_us=0.0)
    (chain,) = chained(monkeypatch, gains_nothing).schedule
    assert not any(variant.programmatic for variant in chain.variants)
    assert any("nothing is predicted to be gained" in edge.why for v in chain.variants for edge in v.edges)
    (forced,) = chained(monkeypatch, gains_nothing, pdl="on").schedule
    assert all(variant.programmatic for variant in forced.variants)
    (without_model,) = chained(monkeypatch, None).schedule
    assert all(variant.programmatic and variant.predicted_us is None for variant in without_model.variants)


def test_there_is_nothing_to_calibrate_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="no CUDA device"):
        calibrate()
    assert device.cost_model("cuda") is None and device.cost_model("cpu") is None


def test_the_dag_of_a_report_tells_the_critical_path(monkeypatch, h200):
    (dag,) = chained(monkeypatch, h200, tokens=300).dags
    stages = {node["label"]: node for node in dag.nodes if node["kind"] == "stage"}
    assert all(node["critical"] and node["slack_us"] == 0 for node in stages.values()), "a block is one chain"
    sizes = {"k": K, "E": E, "H": H, "I": I, "N": 2 * I, "w": 2}
    for label, node in stages.items():
        assert node["predicted_us"] == pytest.approx(h200.time_us(label, sizes, 300), abs=1e-3)
    assert "penwidth" in dags_text([dag]) and "µs" in dags_text([dag])
    (plain,) = chained(monkeypatch, None).dags
    assert not any("critical" in node or "predicted_us" in node for node in plain.nodes)


def test_many_launches_at_once_take_what_each_takes():
    moved, work = torch.tensor([0.0, 1e3, 1e7, 5e8, 0.0]), torch.tensor([0.0, 0.0, 1e9, 4e12, 1e9])
    for model in device_model.device_model("NVIDIA H200").kernels.values():
        each = [model.time_us(float(m), float(w)) for m, w in zip(moved, work, strict=True)]
        assert model.times_us(moved.double(), work.double()).tolist() == pytest.approx(each, rel=1e-12)


@pytest.mark.parametrize("tokens", [1, 37, 4096])
def test_the_costs_of_given_rows_are_those_of_uniform_routing_where_the_rows_are(tokens: int):
    sizes = {"k": 8, "E": 128, "H": 2048, "I": 768, "N": 1536, "w": 2}
    hit = 128 * (1 - (1 - 8 / 128) ** tokens)
    inner = tuple(sorted((letter, sizes[letter]) for letter in "HINw"))
    for name in device_model.device_model("NVIDIA H200").kernels:
        cost = stage_cost(name, sizes)
        bytes_of, work_of = load_cost(name, inner)
        given = (tokens, 8 * tokens, hit, 128)
        assert bytes_of(*given) == pytest.approx(float(cost.bytes.subs(T, tokens)), rel=1e-9)
        assert work_of(*given) == pytest.approx(float(cost.work.subs(T, tokens)), rel=1e-9)
