"""Memory between the kernels of a chain: what it is by default, what options["memory"]="low" makes of it and where."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_compiler import device, memory
from moe_compiler.backend import last_reports, moepdl
from moe_compiler.block_program import BlockSizes, backward_program, forward_program
from moe_compiler.memory import CHUNK_BYTES, in_chunks
from moe_compiler.passes.chain_pdl import chain_pdl
from moe_compiler.passes.expand_stages import expand_stages
from moe_compiler.pdl_rules import Wait, check
from moe_compiler.pipeline import run_passes
from moe_compiler.report import Report
from moe_compiler.runtime_kernels.chain.memory import peak_bytes
from moe_compiler.runtime_kernels.chain.program import Program
from moe_compiler.verify import grids
from tests.moe_compiler.blocks import TOKENS, assert_block_is_accurate, qwen3_block
from tests.moe_compiler.graphs import backward_graph, context, forward_graph

QWEN3 = BlockSizes(128, 8, 2048, 768)
MIXTRAL = BlockSizes(8, 2, 4096, 14336)
DEEPSEEK = BlockSizes(256, 8, 7168, 2048)
SHAPES = [QWEN3, MIXTRAL, DEEPSEEK, BlockSizes(32, 4, 2880, 2880, torch.float16), BlockSizes(16, 1, 1024, 512)]


def rows_bytes(sizes: BlockSizes, tokens: int) -> int:
    """The rows between the kernels: T*k of the intermediate and of the hidden size."""
    return tokens * sizes.k * (sizes.intermediate + sizes.hidden) * sizes.named["w"]


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", [512, 8192, 32768, 200_000])
def test_a_forward_chain_takes_its_rows_and_little_more(sizes, tokens):
    rows = rows_bytes(sizes, tokens)
    assert rows <= peak_bytes(forward_program(sizes), {"T": tokens}) <= 1.05 * rows
    assert peak_bytes(forward_program(sizes, save=True), {"T": tokens}) <= 1.05 * rows, "what is kept is an output"


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 512, 8192, 32768, 200_000, 2_000_000])
def test_low_takes_at_most_half_where_there_is_much_and_nothing_off_where_there_is_little(sizes, tokens):
    whole = peak_bytes(forward_program(sizes), {"T": tokens})
    low = peak_bytes(forward_program(sizes, low=True), {"T": tokens})
    assert low <= CHUNK_BYTES
    assert low == whole if whole <= CHUNK_BYTES else low <= 1.05 * whole / 2


def test_qwen3_at_many_tokens():
    """The numbers of the documentation."""
    assert peak_bytes(forward_program(QWEN3), {"T": 32768}) / 1e6 == pytest.approx(1478, abs=1)
    assert peak_bytes(forward_program(QWEN3, low=True), {"T": 32768}) / 1e6 == pytest.approx(493, abs=1)


def test_few_tokens_keep_their_variants():
    whole, low = forward_program(QWEN3), forward_program(QWEN3, low=True)
    assert low.variants[:-1] == whole.variants[:-1]
    assert replace(low.variants[-1], chunks=None) == whole.variants[-1]
    assert Program.from_text(low.to_text()) == low
    chunks = low.variants[-1].chunks
    assert chunks is not None and chunks.inputs == ("x",)
    assert peak_bytes(whole, {"T": chunks.tokens}) <= CHUNK_BYTES < peak_bytes(whole, {"T": chunks.tokens + 16})


def test_what_training_keeps_stays_whole():
    saving, back = forward_program(QWEN3, save=True), backward_program(QWEN3)
    program, why = in_chunks(saving)
    assert program == saving and "preact" in why["blocked"]
    program, why = in_chunks(back)
    assert program == back and "grad_act reads preact" in why["stages"]


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(device, "why_no_pdl", lambda kind: "" if kind == "cuda" else f"the block runs on {kind}")


def test_chunks_are_held_to_the_rules(hopper, monkeypatch):
    """The second chunk writes where the first one read: that is seen, and a wait that does not cover it is refused."""
    monkeypatch.setattr(memory, "CHUNK_BYTES", 1)
    ctx = context(memory="low")
    run_passes(forward_graph(), (expand_stages, chain_pdl), ctx)
    (chain,) = ctx.chains
    variant = chain.program.variants[-1]
    assert variant.chunks is not None and variant.chunks.tokens == 16
    found, launches = grids(chain, variant), len(variant.launches)
    assert [grid.name for grid in found] == [launch.kernel for launch in variant.launches] * 2
    assert not found[launches].attribute and found[launches + 1].attribute
    pairs = variant.launches[-1].ins["pairs"]
    assert pairs in found[launches].writes and pairs not in found[0].writes
    assert not check(found)
    early = [*found[:launches], replace(found[launches], attribute=True, wait=Wait.NONE), *found[launches + 1 :]]
    assert any(f"writes {pairs}, which combine may still be using" in str(violation) for violation in check(early))


def test_the_report_tells_memory_chunks_and_what_stays_whole(hopper):
    lines = {}
    for phase, graph, options in (
        ("forward", forward_graph(4096), {}),
        ("forward", forward_graph(4096), {"memory": "low"}),
        ("backward", backward_graph(tokens=4096), {"memory": "low"}),
    ):
        ctx = context(phase, **options)
        run_passes(graph, (expand_stages, chain_pdl), ctx)
        (line,) = [line for line in str(ctx.report).splitlines() if "memory:" in line]
        lines[phase, bool(options)] = line.strip()
        again = Report.from_dict(ctx.report.to_dict())
        assert again.schedule == ctx.report.schedule
    assert lines["forward", False] == "memory: forward 0.836 MB at T=4096 beside inputs and outputs"
    assert lines["forward", True].startswith(
        "memory: forward 0.836 MB at T=4096 beside inputs and outputs, in chunks of"
    )
    assert 'options["memory"]="low" leaves it whole: grad_act reads preact' in lines["backward", True]


def compiled(function, **options):
    return torch.compile(
        function, backend=moepdl, options={"remainder": "eager", "require_match": True, "memory": "low", **options}
    )


def chunks_of(report, direction):
    """By chain, the chunks of its last variant."""
    found = [chain.variants[-1].memory for chain in report.schedule if chain.direction == direction]
    return [None if told is None else told.chunk_tokens for told in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_accurate_in_chunks_and_trained_whole(dtype, monkeypatch):
    monkeypatch.setattr(memory, "CHUNK_BYTES", 4096)
    block = qwen3_block(dtype)
    ours = compiled(block)
    before = last_reports()
    for tokens in TOKENS:
        assert_block_is_accurate(ours, block, tokens, dtype, "cpu")
    reports = [report for report in last_reports() if not any(report is other for other in before)]
    inference = [report for report in reports if not any(chain.direction == "backward" for chain in report.schedule)]
    assert any(0 < (chunk or 0) < 512 for report in inference for chunk in chunks_of(report, "forward"))
    trained = [report for report in reports if report not in inference]
    assert trained and all(chunks_of(report, "backward") == [None] for report in trained)


def test_dynamic_tokens_through_inductor(monkeypatch):
    monkeypatch.setattr(memory, "CHUNK_BYTES", 4096)
    block = qwen3_block()
    with torch.no_grad():
        ours = torch.compile(block, backend=moepdl, dynamic=True, options={"memory": "low", "require_match": True})
        for tokens in (3, 512, 37):
            x = torch.randn(1, tokens, 32)
            torch.testing.assert_close(ours(x), block(x))
    assert chunks_of(last_reports()[-1], "forward")[0] < 512


def test_the_first_forward_of_a_checkpoint_is_cut(monkeypatch):
    """Nothing is kept of it, so it is as in inference; the second one, in the backward graph, keeps everything."""
    monkeypatch.setattr(memory, "CHUNK_BYTES", 4096)
    block = qwen3_block()

    def function(x):
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)

    x = torch.randn(1, 700, 32, requires_grad=True)
    ours = compiled(function)
    out, eager = ours(x), block(x)
    torch.testing.assert_close(out, eager)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x), torch.autograd.grad(eager.sum(), x))
    report = last_reports()[-1]
    assert all(0 < (chunk or 0) < 700 for chunk in chunks_of(report, "forward"))
    assert chunks_of(report, "backward") and not any(chunks_of(report, "backward"))
