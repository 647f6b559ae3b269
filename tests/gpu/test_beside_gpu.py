"""A chain on a second stream: the bits of its one-stream twin, in and out of CUDA graphs, beside memory traffic, on
memory that others fill with poison as soon as the allocator lets them."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch

from moe_compiler import device
from moe_compiler.backend import last_reports
from moe_compiler.block_program import BlockSizes, backward_program, forward_program, inputs_of, weights_of
from moe_compiler.branches import FEW_ROWS
from moe_compiler.graph_edges import read_edges
from moe_compiler.runtime_kernels.chain.prepared import prepare
from tests.moe_compiler import shared_expert
from tests.moe_compiler.blocks import qwen3_block

pytestmark = pytest.mark.gpu
bound = pytest.importorskip("moe_compiler.runtime_kernels.chain.bound", reason="triton is not installed")

ops = torch.ops.moepdl
# hidden, intermediate, experts, k, width of the shared expert: a second stream gains from one token on.
GAINING = (2048, 1024, 32, 4, 1024)
QWEN3 = BlockSizes(128, 8, 2048, 768)
SMALL = BlockSizes(32, 4, 1024, 512)
# (sizes, T, backward, replays)
CHAINS = [(QWEN3, 1, False, 3_000), (QWEN3, 8, False, 3_000), (QWEN3, 64, False, 1_000), (SMALL, 64, True, 1_000)]
# Cycles that keep the current stream busy, so that the host is ahead of the device: about 2 ms.
_BUSY = 4_000_000
# A piece of memory as large as one that a chain uses in between, some of each size.
_SIZES = tuple(1 << n for n in range(9, 25))


def operands_of(sizes: BlockSizes, tokens: int, backward: bool):
    """The operands of a chain and its text."""
    program = backward_program if backward else forward_program
    tensors = inputs_of(sizes, tokens, weights_of(sizes, "cuda"), "cuda", backward=backward)
    return tensors, program(sizes).to_text()


def poison() -> None:
    """Take whatever memory the allocator gives to the current stream, of every size, and fill it with NaN."""
    taken = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in _SIZES for _ in range(3)]
    for tensor in reversed(taken):
        tensor.fill_(0xFF)


def beside(tensors, text, branch):
    """The chain's results, and what the branch computed while it was under way."""
    token = ops.chain_start(tensors, text, None, False)
    other = branch()
    return ops.chain_wait(token, tensors, [], text), other


def name_of(case) -> str:
    sizes, tokens, backward, _ = case
    return f"{'backward' if backward else 'forward'}-E{sizes.experts}-T{tokens}"


@pytest.mark.parametrize("case", CHAINS, ids=name_of)
def test_replays_beside_traffic_and_poison_equal_the_one_stream_twin(case):
    sizes, tokens, backward, replays = case
    tensors, text = operands_of(sizes, tokens, backward)
    square = torch.randn(sizes.hidden, sizes.hidden, device="cuda", dtype=torch.bfloat16)
    x = tensors[0]
    wrong = torch.zeros((), dtype=torch.int32, device="cuda")

    def branch():
        first = torch.mm(x, square)
        poison()
        return torch.mm(first, square)

    def both() -> None:
        twin, expected = ops.chain(tensors, text), branch()
        for _ in range(2):  # the second one starts while the first one's memory is free again
            mine, other = beside(tensors, text, branch)
            for one, theirs in zip(mine, twin, strict=True):
                wrong.add_((one != theirs).any())
            wrong.add_((other != expected).any())

    for _ in range(3):  # watched, bound, launched by the driver
        both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        both()
    edges = read_edges(graph)
    variant = prepare(text).variant([tokens])
    if not device.why_no_pdl("cuda"):
        # A library's matmul may have programmatic edges of its own.
        assert sum(edge.programmatic for edge in edges) >= 3 * sum(launch.pdl for launch in variant.launches) > 0
    assert forks(edges) >= 2 and joins(edges) >= 2
    graph.instantiate()
    wrong.zero_()
    traffic, other = torch.empty(1 << 28, dtype=torch.uint8, device="cuda"), torch.cuda.Stream()
    for index in range(replays):
        if index % 4 == 0:
            with torch.cuda.stream(other):
                traffic.add_(1)
        graph.replay()
    torch.cuda.synchronize()
    assert int(wrong) == 0


def forks(edges) -> int:
    """Nodes of a captured graph with two followers."""
    return sum(count > 1 for count in Counter(edge.source for edge in edges).values())


def joins(edges) -> int:
    """Nodes of a captured graph that wait for two others."""
    return sum(count > 1 for count in Counter(edge.target for edge in edges).values())


def rounds_with(branch, tensors, text, count: int) -> int:
    """How many of some rounds without a CUDA graph give other bits than the twin, with the host ahead of the device."""
    twin = [t.clone() for t in ops.chain(tensors, text)]
    wrong = torch.zeros((), dtype=torch.int32, device="cuda")
    for _ in range(count):
        torch.cuda._sleep(_BUSY)
        mine, _ = beside(tensors, text, branch)
        wrong.add_(torch.stack([(one != theirs).any() for one, theirs in zip(mine, twin, strict=True)]).any())
    torch.cuda.synchronize()
    return int(wrong)


@pytest.mark.parametrize("case", CHAINS, ids=name_of)
def test_without_a_graph_no_memory_is_handed_on_before_the_join(case):
    sizes, tokens, backward, _ = case
    tensors, text = operands_of(sizes, tokens, backward)
    assert rounds_with(poison, tensors, text, 100) == 0


def test_the_poison_finds_memory_that_is_handed_on_too_early(monkeypatch):
    """The same with the memory in between allocated on the current stream, as it would be without a thought.

    The branch takes memory of just that size again and again for as long as the chain runs. The poison is zero, which
    is wrong for activations and points nowhere outside as an index.
    """
    tensors, text = operands_of(QWEN3, 64, False)
    empty, main, asked = torch.empty, torch.cuda.current_stream(), set()

    def branch():
        for _ in range(40):
            for size in asked:
                empty(size, dtype=torch.uint8, device="cuda").zero_()

    def watched(size, **kwargs):
        if torch.cuda.current_stream() != main and isinstance(size, int):
            asked.add(size)
        return empty(size, **kwargs)

    def careless(size, **kwargs):
        with torch.cuda.stream(main):
            return empty(size, **kwargs)

    monkeypatch.setattr(bound.torch, "empty", watched)
    assert rounds_with(branch, tensors, text, 5) == 0
    assert asked, "the chain has asked for memory in between"
    monkeypatch.setattr(bound.torch, "empty", careless)
    assert rounds_with(branch, tensors, text, 20) > 0


def test_operands_may_be_dropped_while_the_chain_reads_them():
    tensors, text = operands_of(QWEN3, 64, False)
    (expected,) = ops.chain(tensors, text)
    for _ in range(50):
        torch.cuda._sleep(_BUSY)
        own = [tensors[0].clone(), *tensors[1:]]
        token = ops.chain_start(own, text, None, False)
        shapes = [own[0].shape] * 4
        del own
        for shape in shapes:
            torch.empty(shape, dtype=torch.bfloat16, device="cuda").fill_(float("nan"))
        assert torch.equal(ops.chain_wait(token, tensors, [], text)[0], expected)


def test_a_chain_that_is_never_waited_for_harms_nobody():
    tensors, text = operands_of(QWEN3, 64, False)
    (expected,) = ops.chain(tensors, text)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        torch.cuda._sleep(_BUSY)
        token = ops.chain_start([tensors[0].clone(), *tensors[1:]], text, None, False)
        del token
        kept = [torch.full((64, 2048), 3.0, dtype=torch.bfloat16, device="cuda") for _ in range(8)]
        mine, _ = beside(tensors, text, poison)
        assert torch.equal(mine[0], expected)
        assert all(bool((t == 3.0).all()) for t in kept), "the lost chain wrote into memory of others"
        del mine, kept
    torch.cuda.synchronize()
    torch.empty(1 << 20, device="cuda")  # lets the allocator look at its events
    assert torch.cuda.memory_allocated() - before < 1 << 20


def test_memory_does_not_grow():
    tensors, text = operands_of(QWEN3, 8, False)
    for _ in range(4):
        beside(tensors, text, poison)
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    for _ in range(300):
        beside(tensors, text, poison)
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() == before


def test_user_streams_and_threads_have_sides_of_their_own():
    tensors, text = operands_of(SMALL, 40, False)
    (expected,) = ops.chain(tensors, text)
    torch.cuda.synchronize()
    wrong: list[int] = []

    def run() -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            for index in range(200):
                mine, _ = beside(tensors, text, poison)
                if not torch.equal(mine[0], expected):
                    wrong.append(index)

    for _ in range(3):  # bound first
        beside(tensors, text, poison)
    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# Whole models


def compiled(model, **options):
    torch._dynamo.reset()
    prepare.cache_clear()
    return torch.compile(model, backend="moepdl", options={"require_match": True, **options})


def overlapped() -> list[bool]:
    return [branch.overlapped for dag in last_reports()[-1].dags for branch in dag.branches]


@pytest.mark.parametrize("remainder", ["eager", "inductor"])
def test_training_gives_the_bits_of_one_stream(remainder):
    """The backward graph runs in a thread of autograd's."""
    model = shared_expert.model(dtype=torch.bfloat16).cuda()
    for tokens in (3, 64, 700):
        x = torch.randn(1, tokens, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        grad = torch.randn_like(x)
        found = []
        for overlap in ("off", "on"):
            ours = compiled(model, overlap=overlap, remainder=remainder)
            rounds = []
            for _ in range(20):
                out = ours(x)
                rounds.append([out.detach(), *torch.autograd.grad(out, [x, *model.parameters()], grad)])
            assert overlapped() == [overlap == "on"] * 4
            assert all(torch.equal(a, b) for one in rounds[1:] for a, b in zip(one, rounds[0], strict=True))
            found.append(rounds[0])
        same(found, remainder)


def same(found, remainder: str) -> None:
    """Bit by bit; Inductor fuses a sum with a matmul or does not, by who else reads it, and so rounds otherwise."""
    for mine, twin in zip(*found, strict=True):
        if remainder == "eager":
            assert torch.equal(mine, twin)
        else:
            torch.testing.assert_close(mine, twin, rtol=0.02, atol=0.02 * twin.abs().max().item())


def in_a_graph(function, x):
    """A call captured into a graph that is kept, its edges and its result."""
    with torch.no_grad():
        for _ in range(3):
            function(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            out = function(x)
        edges = read_edges(graph)
        graph.instantiate()
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
    return edges, out


@pytest.mark.parametrize(("tokens", "two"), [(1, True), (FEW_ROWS, True), (FEW_ROWS + 1, False)])
def test_a_captured_model_forks_up_to_the_limit_and_keeps_its_programmatic_edges(tokens, two):
    model = shared_expert.model(dtype=torch.bfloat16, sizes=GAINING).cuda()
    x = torch.randn(1, tokens, GAINING[0], device="cuda", dtype=torch.bfloat16)
    found = {}
    for overlap in ("off", "auto"):
        found[overlap] = in_a_graph(compiled(model, overlap=overlap), x)
    (off, twin), (edges, out) = found["off"], found["auto"]
    if "H200" in torch.cuda.get_device_name():
        assert overlapped() == [two] * 2, last_reports()[-1].dags[0].branches
    assert forks(off) == 0 and (forks(edges) > 0) == any(overlapped())
    if not device.why_no_pdl("cuda"):
        variants = [chain.variants for chain in last_reports()[-1].schedule]
        taken = [next(v for v in each if v.max_tokens is None or tokens <= v.max_tokens) for each in variants]
        planned = sum(launch.pdl for variant in taken for launch in variant.launches)
        assert min(sum(e.programmatic for e in each) for each in (edges, off)) >= planned > 0
    same([[out], [twin]], "inductor")


def test_outside_of_a_graph_auto_keeps_one_stream(monkeypatch):
    model = shared_expert.model(dtype=torch.bfloat16, sizes=GAINING).cuda()
    x = torch.randn(1, 8, GAINING[0], device="cuda", dtype=torch.bfloat16)
    taken = []
    from moe_compiler.runtime_kernels.chain import beside as operators

    take_off = operators.take_off
    monkeypatch.setattr(operators, "take_off", lambda *given: taken.append(1) or take_off(*given))
    ours = compiled(model)
    with torch.no_grad():
        for _ in range(4):
            ours(x)
        assert not taken
        in_a_graph(ours, x)
    assert len(taken) == 2 * any(overlapped())


def test_with_dynamic_tokens_the_limit_is_kept_at_each_capture():
    model = shared_expert.model(dtype=torch.bfloat16, sizes=GAINING).cuda()
    ours = torch.compile(model, backend="moepdl", dynamic=True)
    for tokens in (5, FEW_ROWS, FEW_ROWS + 1, 300):
        x = torch.randn(1, tokens, GAINING[0], device="cuda", dtype=torch.bfloat16)
        edges, out = in_a_graph(ours, x)
        assert (forks(edges) > 0) == (any(overlapped()) and tokens <= FEW_ROWS)
        with torch.no_grad():
            assert torch.equal(out, ours(x))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("overlap", ["auto", "on"])
def test_inductors_cuda_graphs(overlap, training):
    """mode="reduce-overhead": warmed up, captured, replayed; "on" also takes a second stream while it warms up."""
    model = shared_expert.model(dtype=torch.bfloat16, sizes=GAINING).cuda()
    x = torch.randn(1, 8, GAINING[0], device="cuda", dtype=torch.bfloat16, requires_grad=training)
    grad = torch.randn_like(x)
    found = []
    for value in ("off", overlap):
        ours = compiled(model, overlap=value, mode="reduce-overhead")
        rounds = []
        for _ in range(8):
            torch.compiler.cudagraph_mark_step_begin()
            if training:
                out = ours(x)
                rounds.append(
                    [
                        out.detach().clone(),
                        *(g.clone() for g in torch.autograd.grad(out, [x, *model.parameters()], grad)),
                    ]
                )
            else:
                with torch.no_grad():
                    rounds.append([ours(x).clone()])
        assert all(torch.equal(a, b) for one in rounds[1:] for a, b in zip(one, rounds[0], strict=True))
        found.append(rounds[0])
    same(found, "inductor")
    if overlap == "on":
        assert all(overlapped())


def test_an_error_between_start_and_wait_leaves_everything_usable():
    tensors, text = operands_of(QWEN3, 64, False)
    (expected,) = ops.chain(tensors, text)

    def branch():
        raise RuntimeError("out of luck")

    for _ in range(5):
        torch.cuda._sleep(_BUSY)
        with pytest.raises(RuntimeError, match="out of luck"):
            beside(tensors, text, branch)
        poison()
        assert torch.equal(ops.chain(tensors, text)[0], expected)
    mine, _ = beside(tensors, text, poison)
    assert torch.equal(mine[0], expected)


def test_a_block_without_a_shared_expert_is_as_before():
    block = qwen3_block(torch.bfloat16).cuda()
    x = torch.randn(1, 8, 32, device="cuda", dtype=torch.bfloat16)
    edges, _ = in_a_graph(compiled(block), x)
    assert overlapped() == [] and forks(edges) == 0
