"""Measured gains of programmatic edges: what is timed, what is kept, and what is decided by it. The timer is a fake."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from moe_compiler import device, edge_timing
from moe_compiler.chain_operands import NoSample, operand_layouts, sample_operands
from moe_compiler.cost import T
from moe_compiler.device_model import DeviceModel
from moe_compiler.edge_gain import Gains, gains, table_digest, table_path
from moe_compiler.errors import PassError
from moe_compiler.passes.chain_pdl import chain_pdl
from moe_compiler.passes.expand_stages import expand_stages
from moe_compiler.pipeline import run_passes
from moe_compiler.runtime_kernels.chain.program import Program
from moe_compiler.viz.timeline import schedule_text
from tests.moe_compiler.graphs import EXPERTS, ROUTE, E, H, I, backward_graph, context, forward_graph

# What the edge into each launch gains, in microseconds; the third one is better off plain.
GAINS = {1: 0.8, 2: 0.5, 3: -0.3, 4: 0.25, 5: 0.1}
TOKENS = {"few": 1, "sorted": 300, "blocked": 4096}


def chain_of(module, phase="forward", **options):
    ctx = context(phase, pdl="off", tune="off", **options)
    run_passes(module, (expand_stages, chain_pdl), ctx)
    (chain,) = ctx.chains
    return chain


def dynamic_graph():
    """The forward block with rows and columns of tokens that are symbols: T is their product."""

    def block(x, router, gate_up, down):
        rows = x.flatten(0, 1)
        weights, ids = torch.ops.moepdl.route(rows @ router, *ROUTE)
        return torch.ops.moepdl.experts(rows, ids, weights, [gate_up], [], [down], [], [], [], *EXPERTS)

    mode = FakeTensorMode(shape_env=ShapeEnv())
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
    tokens = mode.from_tensor(torch.empty(3, 5, device="meta"), symbolic_context=dynamic).shape
    with mode:
        shapes = ((*tokens, H), (H, E), (E, 2 * I, H), (E, H, I))
        made = [torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
        return make_fx(block, tracing_mode="symbolic")(*made)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_a_chain_runs_on_the_operands_that_are_made_up(phase, tokens):
    module = forward_graph(tokens) if phase == "forward" else backward_graph(tokens=tokens)
    chain = chain_of(module, phase)
    operands = sample_operands(chain, tokens, "cpu")
    for made, node in zip(operands, chain.operands, strict=True):
        value = node.meta["val"]
        assert (made.shape, made.stride(), made.dtype) == (value.shape, value.stride(), value.dtype)
    results = torch.ops.moepdl.chain(operands, chain.program.to_text())
    assert results and all(torch.isfinite(result).all() for result in results)
    again = sample_operands(chain, tokens, "cpu")
    assert all(torch.equal(a, b) for a, b in zip(operands, again, strict=True))


def test_making_operands_up_leaves_the_models_random_numbers_alone():
    chain, state = chain_of(forward_graph(8)), torch.get_rng_state()
    sample_operands(chain, 8, "cpu")
    assert torch.equal(state, torch.get_rng_state())


def test_layouts_are_written_in_tokens_whatever_the_symbols():
    layouts = {layout.name: layout for layout in operand_layouts(chain_of(dynamic_graph()))}
    assert (layouts["x"].shape, layouts["x"].stride) == ((T, H), (H, 1))
    assert layouts["logits"].shape == (T, E) and not layouts["logits"].weight
    assert layouts["gate"].shape == (E, 2 * I, H) and layouts["gate"].weight
    operands = sample_operands(chain_of(dynamic_graph()), 7, "cpu")
    assert [tuple(t.shape) for t in operands] == [(7, E), (7, H), (E, 2 * I, H), (E, H, I)]


def test_operands_that_cannot_be_made_up_are_named():
    chain = chain_of(backward_graph(tokens=4), "backward")
    renamed = tuple(("mask" if name == "perm" else name, count) for name, count in chain.program.inputs)
    odd = replace(chain, program=replace(chain.program, inputs=renamed))
    with pytest.raises(NoSample, match=r"operand mask is a torch.int32 of shape \[8\]: nothing says what it may be"):
        sample_operands(odd, 4, "cpu")
    node = next(node for node in chain.operands if node.name == "x_1")
    wide = node.meta["val"].new_empty(4, 1).expand(4, H)
    node.meta["val"] = wide
    with pytest.raises(NoSample, match="operand x is expanded"):
        sample_operands(chain, 4, "cpu")


def test_a_size_that_tokens_do_not_decide_is_told():
    chain = chain_of(dynamic_graph())
    source = next(node for node in chain.operands if node.meta["val"].dim() == 3)
    odd = ShapeEnv().create_unbacked_symint()
    source.meta["val"] = type("Odd", (), {"dtype": torch.bfloat16, "shape": (odd, 1), "stride": lambda self: (1, 1)})()
    with pytest.raises(NoSample, match="which the number of tokens does not decide"):
        operand_layouts(chain)


class Timer:
    """Times of a chain whose edges gain GAINS, drifting from round to round; `asked` is what was timed."""

    def __init__(self):
        self.asked: list[tuple[int, list[str]]] = []

    def __call__(self, chain, tokens, texts):
        self.asked.append((tokens, sorted(texts)))
        found = {}
        for way, text in texts.items():
            (variant,) = (v for v in Program.from_text(text).variants if any(launch.pdl for launch in v.launches))
            gained = sum(GAINS[index] for index, launch in enumerate(variant.launches) if launch.pdl)
            found[way] = [100.0 + 5.0 * turn - gained for turn in range(9)]
        return found


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """The compiler's view of a machine with an H200 whose gains are predicted to be nothing, and its timer."""
    timer = Timer()
    monkeypatch.setenv("MOEPDL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(device, "why_no_pdl", lambda kind: "" if kind == "cuda" else f"the block runs on {kind}")
    monkeypatch.setattr(device, "cost_model", lambda kind: DeviceModel("NVIDIA H200", "shipped", {}, 0.0))
    monkeypatch.setattr(edge_timing, "times_us", timer)
    # Tiles are the subject of test_tuning.
    monkeypatch.setattr("moe_compiler.passes.chain_pdl.tiled_chain", lambda chain, options: (chain, ""))
    return timer


def compiled(tokens=300, **options):
    ctx = context(**options)
    run_passes(forward_graph(tokens), (expand_stages, chain_pdl), ctx)
    return ctx


def variant_of(ctx, name):
    (chain,) = ctx.report.schedule
    return next(variant for variant in chain.variants if variant.name == name)


def test_measured_gains_decide_over_predicted_ones(machine):
    ctx = compiled(tune="full")
    assert ctx.report.measured == "measured on NVIDIA H200"
    sorted_ = variant_of(ctx, "sorted")
    assert [launch.kernel for launch in sorted_.launches] == ["route", "order", "gate_up", "down", "combine"]
    assert [launch.pdl for launch in sorted_.launches] == [False, True, True, False, True]
    near = {edge.consumer: edge for edge in sorted_.edges if edge.producer == edge.consumer - 1}
    assert {consumer: edge.measured_us for consumer, edge in near.items()} == {
        index: pytest.approx(GAINS[index]) for index in (1, 2, 3, 4)
    }
    assert near[3].why == 'nothing is measured to be gained on this device (options["pdl"] is "auto")'
    # 300 tokens are a constant of this graph: the other variants never run, and their edges go by the prediction.
    assert machine.asked == [(300, ["1", "2", "3", "4", "all"])]
    blocked = variant_of(ctx, "blocked")
    assert blocked.programmatic == 0 and all(edge.measured_us is None for edge in blocked.edges)
    text = schedule_text(ctx.report)
    assert "gain 0.00 us predicted, 0.80 us measured" in text and "0.00 us predicted, -0.30 us measured" in text
    assert "edges 0 > 4 (weights), 1 > 3 (perm, starts): plain" in text


def test_what_was_measured_is_kept_and_looked_up(machine):
    assert compiled().report.measured.startswith("not measured: this chain is not in the table")
    assert variant_of(compiled(), "sorted").programmatic == 0, "the prediction decides"
    before = table_digest()
    compiled(tune="full")
    assert len(machine.asked) == 1 and table_digest() != before
    assert json.loads(table_path("NVIDIA H200").read_text())["device"] == "NVIDIA H200"
    looked_up = compiled(tune="cached")
    assert variant_of(looked_up, "sorted").programmatic == 3
    compiled(tune="full")
    assert len(machine.asked) == 1, "what is in the table is not measured again"
    off = compiled(tune="off")
    assert variant_of(off, "sorted").programmatic == 0
    assert off.report.measured == 'not measured: options["tune"] is "off"'
    assert compiled(tokens=301).report.measured.startswith("not measured: this chain is not in the table")
    compiled(tokens=301, tune="full")
    assert len(machine.asked) == 2 and variant_of(compiled(), "sorted").programmatic == 3, "rows are added"


def test_on_is_every_provable_edge_whatever_was_measured(machine):
    ctx = compiled(tune="full", pdl="on")
    sorted_ = variant_of(ctx, "sorted")
    assert [launch.pdl for launch in sorted_.launches] == [False, True, True, True, True]
    assert min(edge.measured_us for edge in sorted_.edges if edge.measured_us is not None) == pytest.approx(-0.3)
    off = compiled(pdl="off")
    assert not any(launch.pdl for launch in variant_of(off, "sorted").launches)
    assert variant_of(off, "sorted").edges[0].measured_us == pytest.approx(0.8), "told all the same"


def test_with_symbolic_tokens_every_variant_is_measured(machine):
    found = gains(chain_of(dynamic_graph()), TOKENS, "full")
    assert machine.asked == [
        (1, ["1", "2", "all"]),
        (300, ["1", "2", "3", "4", "all"]),
        (4096, ["1", "2", "3", "4", "5", "all"]),
    ]
    assert found.of("few", 1) == pytest.approx(GAINS[1]) and found.of("blocked", 5) == pytest.approx(GAINS[5])
    assert found.of("few", 0) is None and found.of("nothing", 1) is None


def test_why_nothing_was_measured_is_told(machine, monkeypatch):
    def full(chain, tokens, texts):
        raise NoSample("the operands do not fit into the device's free memory")

    monkeypatch.setattr(edge_timing, "times_us", full)
    report = compiled(tune="full").report
    assert report.measured == "not measured: the operands do not fit into the device's free memory"
    assert not table_path("NVIDIA H200").exists()
    monkeypatch.setattr(device, "why_no_pdl", lambda kind: "sm_80 is older than sm_90")
    assert compiled(tune="full").report.measured == "not measured: sm_80 is older than sm_90"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert compiled(tune="full").report.measured == "not measured: no CUDA device"
    assert table_digest() == ""
    assert gains(chain_of(forward_graph(4, device="cpu")), TOKENS, "full") == Gains("not measured: no CUDA device")


def test_a_table_that_is_none_is_named(machine):
    path = table_path("NVIDIA H200")
    path.parent.mkdir(parents=True)
    for text in ("nonsense", "{}", '{"gains_us": {"key": {"few": {"1": "much"}}}}', '{"gains_us": 1}'):
        path.write_text(text)
        with pytest.raises(PassError, match=r"nvidia_h200.edges.json is no table of measured gains .*delete it"):
            compiled()
