"""The whole way on a GPU: numbers, programmatic edges in the captured graph, static weights, weights that move."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch

from moe_compiler import device
from moe_compiler.backend import explain, last_reports, moepdl
from moe_compiler.block_program import BlockSizes, forward_program, inputs_of, weights_of
from moe_compiler.errors import KernelError
from moe_compiler.graph_edges import read_edges
from moe_compiler.runtime_kernels import registry
from moe_compiler.runtime_kernels.chain.prepared import PreparedProgram, prepare
from tests.moe_compiler.blocks import (
    TOKENS,
    assert_accurate,
    assert_block_is_accurate,
    float64_block,
    float64_gpt_oss,
    gpt_oss_block,
    qwen3_block,
)

pytestmark = pytest.mark.gpu
bound = pytest.importorskip("moe_compiler.runtime_kernels.chain.bound", reason="triton is not installed")


def compiled(function, *, options=None, **kwargs):
    return torch.compile(
        function, backend=moepdl, options={"remainder": "eager", "require_match": True, **(options or {})}, **kwargs
    )


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_forward_and_backward_are_accurate(dtype, implementation):
    block = qwen3_block(dtype, implementation).cuda()
    ours = compiled(block)
    for tokens in TOKENS:
        assert_block_is_accurate(ours, block, tokens, dtype, "cuda")


def test_through_inductor_with_dynamic_tokens():
    block = qwen3_block(torch.bfloat16).cuda()
    ours = torch.compile(block, backend="moepdl", dynamic=True, options={"require_match": True})
    for tokens in (3, 40, 700):
        assert_block_is_accurate(ours, block, tokens, torch.bfloat16, "cuda")


def captured_edges(function, x):
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                function(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            out = function(x)
        edges = read_edges(graph)
        graph.instantiate()
        graph.replay()
        torch.cuda.synchronize()
    return edges, out


@pytest.mark.parametrize(("tokens", "expected"), [(1, 3), (104, 5), (3000, 6)])
def test_the_captured_graph_has_the_planned_programmatic_edges(tokens, expected):
    if device.why_no_pdl("cuda"):
        pytest.skip(device.why_no_pdl("cuda"))
    block = qwen3_block(torch.bfloat16).cuda()
    x = torch.randn(1, tokens, 32, device="cuda", dtype=torch.bfloat16)
    on, out = captured_edges(torch.compile(block, backend="moepdl", options={"require_match": True}), x)
    assert sum(edge.programmatic for edge in on) == expected
    torch._dynamo.reset()
    off, twin = captured_edges(torch.compile(block, backend="moepdl", options={"pdl": "off", "require_match": True}), x)
    assert sum(edge.programmatic for edge in off) == 0
    assert torch.equal(out, twin)


@pytest.mark.parametrize("tokens", [1, 100])
def test_gains_are_measured_kept_and_decide(tokens, tmp_path, monkeypatch):
    if device.why_no_pdl("cuda"):
        pytest.skip(device.why_no_pdl("cuda"))
    monkeypatch.setenv("MOEPDL_CACHE_DIR", str(tmp_path))
    block = qwen3_block(torch.bfloat16).cuda()
    x = torch.randn(1, tokens, 32, device="cuda", dtype=torch.bfloat16)
    numbers = torch.cuda.get_rng_state()
    with torch.no_grad():
        report = explain(block, x, options={"tune": "full", "tune_budget_s": 5})
        assert torch.equal(numbers, torch.cuda.get_rng_state())
        assert report.measured == f"measured on {torch.cuda.get_device_name()}"
        (chain,) = report.schedule
        variant = next(v for v in chain.variants if v.max_tokens is None or tokens <= v.max_tokens)
        near = [edge for edge in variant.edges if edge.producer == edge.consumer - 1]
        assert len(near) == len(variant.launches) - 1
        for edge in near:
            assert abs(edge.measured_us) < 20 and edge.programmatic == (edge.measured_us > 0), edge
        again = explain(block, x)
        assert again.measured == report.measured and again.schedule == report.schedule, "looked up, not measured anew"
        assert_accurate(compiled(block)(x), block(x), float64_block(block, x))


def test_weights_are_not_copied_at_each_step_under_cuda_graphs():
    block = qwen3_block(torch.bfloat16).cuda()
    ours = torch.compile(block, backend="moepdl", mode="reduce-overhead")
    x = torch.randn(1, 8, 32, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        for _ in range(4):
            out = ours(x).clone()
        assert_accurate(out, block(x), float64_block(block, x))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            ours(x)
            torch.cuda.synchronize()
    copies = [event for event in profile.events() if "memcpy" in event.name.lower() and "dtod" in event.name.lower()]
    assert len(copies) <= 1, [event.name for event in copies]


def test_weights_that_move_are_seen_at_the_next_call():
    block = qwen3_block(torch.bfloat16).cuda()
    ours = compiled(block)
    x = torch.randn(1, 7, 32, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        ours(x)
        block.load_state_dict({k: torch.randn_like(v) * 0.2 for k, v in block.state_dict().items()}, assign=True)
        assert_accurate(ours(x), block(x), float64_block(block, x))
        for parameter in block.parameters():
            parameter.data = torch.randn_like(parameter) * 0.2
        assert_accurate(ours(x), block(x), float64_block(block, x))


def test_experts_of_a_module_list_are_read_where_they_are_and_may_move():
    from moe_compiler.testing import examples

    example = examples()["where_loop"](dtype=torch.bfloat16)
    module = example.module.cuda()
    x = example.inputs(9)[0].cuda()
    ours = torch.compile(module, backend=moepdl, options={"remainder": "eager", "require_match": True}, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), module(x), rtol=0.05, atol=0.05)
        before = torch.cuda.memory_allocated()
        ours(x)
        assert torch.cuda.memory_allocated() - before < 1 << 20
        for parameter in module.parameters():
            parameter.data = torch.randn_like(parameter) * 0.2
        torch.testing.assert_close(ours(x), module(x), rtol=0.05, atol=0.05)
    assert last_reports()[-1].matches[0].attributes["layout"] == "per expert"


def test_a_kernel_that_fails_is_named_or_falls_back(monkeypatch):
    def broken(outs, ins, attrs, *, pdl):
        raise ValueError("no such tile")

    monkeypatch.setitem(registry.kernel("gate_up_few").__dict__, "launch", broken)
    block = qwen3_block(torch.bfloat16).cuda()
    x = torch.randn(1, 1, 32, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        with pytest.raises(KernelError, match="gate_up_few: no such tile"):
            compiled(block)(x)
        torch._dynamo.reset()
        ours = compiled(block, options={"on_error": "fallback"})
        with pytest.warns(UserWarning, match="fell back"):
            torch.testing.assert_close(ours(x), block(x))
        torch.testing.assert_close(ours(x), block(x))
    assert last_reports()[-1].status == "fallback"


def test_results_are_the_same_bits_on_every_run():
    block = qwen3_block(torch.bfloat16).cuda()
    ours = compiled(block)
    for tokens in (2, 60, 900):
        x = torch.randn(1, tokens, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        grad = torch.randn(1, tokens, 32, device="cuda", dtype=torch.bfloat16)
        first = None
        for _ in range(20):
            out = ours(x)
            found = [out.detach(), *torch.autograd.grad(out, [x, *block.parameters()], grad)]
            first = first or found
            assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True))


@pytest.mark.parametrize("name", ["grouped_mm", "where_loop"])
def test_repeated_launches_compute_what_first_ones_do(name, monkeypatch):
    from moe_compiler.testing import examples

    example = examples()[name](dtype=torch.bfloat16)
    module = example.module.cuda()
    parameters = list(module.parameters())

    def run(ours, seed, tokens):
        torch.manual_seed(seed)
        (x,) = (t.cuda().requires_grad_() for t in example.inputs(tokens))
        with torch.no_grad():
            alone = ours(x)
        out = ours(x)
        return [alone, out.detach(), *torch.autograd.grad(out, [x, *parameters], torch.randn_like(out))]

    def compile_anew():
        torch._dynamo.reset()
        prepare.cache_clear()
        options = {"remainder": "eager", "require_match": True}
        return torch.compile(module, backend=moepdl, options=options, fullgraph=True, dynamic=True)

    calls = [(seed, tokens) for seed in range(4) for tokens in (1, 8, 200, 3000)]
    ours, known = compile_anew(), Counter()
    call = bound.Bound.__call__
    monkeypatch.setattr(bound.Bound, "__call__", lambda self, *given: known.update([self]) or call(self, *given))
    repeated = [run(ours, *each) for each in calls]
    assert known.total() >= 3 * 4, "runs after the first with a number of tokens are repeated"
    assert all(each._graph is not None for each in known), "the driver makes the launches, all in one call"
    monkeypatch.setattr(PreparedProgram, "keep", lambda self, signature, found: None)
    ours = compile_anew()
    known.clear()
    for each, found in zip(calls, repeated, strict=True):
        for one, other in zip(run(ours, *each), found, strict=True):
            assert torch.equal(one, other)
    assert not known


def test_threads_on_streams_of_their_own_share_a_chain():
    """A repeated run writes its addresses into memory that all threads share."""
    sizes = BlockSizes(experts=16, k=2, hidden=128, intermediate=64)
    weights = weights_of(sizes, "cuda")
    text = forward_program(sizes).to_text()
    operands = [inputs_of(sizes, 40, weights, "cuda") for _ in range(4)]
    expected = [torch.ops.moepdl.chain(tensors, text)[0] for tensors in operands]
    torch.cuda.synchronize()
    wrong: list[str] = []

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(300):
                if not torch.equal(torch.ops.moepdl.chain(operands[index], text)[0], expected[index]):
                    wrong.append(f"thread {index}, run {turn}")

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[:5]


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_gpt_oss_is_accurate(implementation):
    """Biases, interleaved columns, clamps: forward and backward for few, some and many tokens.

    Sixteen inputs are judged together: the gradient of the router's bias is eight numbers, each one cancellation.
    """
    block = gpt_oss_block(torch.bfloat16, implementation).cuda()
    ours = compiled(block)
    for tokens in (1, 3, 40, 900):
        assert_block_is_accurate(ours, block, tokens, torch.bfloat16, "cuda", float64_gpt_oss, draws=16)
    (match,) = last_reports()[-1].matches
    assert (match.attributes["packing"], match.attributes["biases"]) == ("interleaved", "gate, down")


def test_a_users_triton_kernel_beside_a_block_is_launched():
    from tests.gpu.late_producer import careless_copy

    block = qwen3_block(torch.bfloat16).cuda()

    def model(x):
        y = block(x)
        out = torch.zeros_like(y)
        careless_copy[(1,)](y, out, y.numel(), 4096, False)
        return out

    x = torch.randn(1, 7, 32, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = block(x)
        for remainder in ("eager", "inductor"):
            torch._dynamo.reset()
            found = compiled(model, options={"remainder": remainder})(x)
            assert_accurate(found, expected, float64_block(block, x))
