"""Races, provoked: kernels behind a producer that is late, and chains replayed beside memory traffic.

What a kernel does before its wait is seen when its producer triggers at once, sleeps and then writes. What a chain does
is held against its PDL-off twin, thousands of times, on poisoned memory: in one graph, compared on the device, so that
the replays follow each other closely.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_compiler import device
from moe_compiler.block_program import BlockSizes, backward_program, forward_program, inputs_of, weights_of
from moe_compiler.graph_edges import read_edges
from moe_compiler.runtime_kernels.registry import kernel
from tests.runtime_kernels.recorded import DEVICE_KERNELS, EXPERTS, TOKENS, K, attributes, operands

pytest.importorskip("triton", reason="the device kernels are written in triton, which is not installed")
from moe_compiler.measure import compile_ahead
from tests.gpu import late_producer as late

pytestmark = pytest.mark.gpu

REPLAYS_OF_A_KERNEL = 200
QWEN3 = BlockSizes(128, 8, 2048, 768)
SMALL = BlockSizes(32, 4, 1024, 512)
# (sizes, T, backward, replays): 10,000 of what takes microseconds, fewer of what takes longer.
CHAINS = [
    (QWEN3, 1, False, 10_000),
    (QWEN3, 8, False, 10_000),
    (QWEN3, 512, False, 3_000),
    (SMALL, 64, True, 10_000),
]


@pytest.fixture(autouse=True)
def _programmatic_launch_is_there() -> None:
    if device.why_no_pdl("cuda"):
        pytest.skip(f"no programmatic dependent launch here: {device.why_no_pdl('cuda')}")


def filled_operands() -> dict[str, Any]:
    """`operands` on the device with values that a block could have: a routing, its order, and random numbers."""
    random = torch.Generator("cuda").manual_seed(0)

    def filled(value: Any) -> Any:
        if isinstance(value, list):
            return [filled(tensor) for tensor in value]
        if not value.dtype.is_floating_point:
            return value.cuda()
        return torch.randn(value.shape, generator=random, device="cuda").to(value.dtype)

    tensors = {name: filled(value) for name, value in operands().items()}
    ids = torch.rand(TOKENS, EXPERTS, generator=random, device="cuda").topk(K).indices
    perm, starts = kernel("order").reference(ids=ids, num_experts=EXPERTS)
    counts = kernel("order_count").reference(ids=ids, num_experts=EXPERTS)
    return tensors | {"ids": ids, "perm": perm.int(), "starts": starts.int(), "counts": counts.int()}


@pytest.mark.parametrize("name", DEVICE_KERNELS)
def test_a_kernel_touches_nothing_before_its_late_producer_has_ended(name):
    tensors, traits = filled_operands(), kernel(name).traits
    inputs = late.Arena({key: tensors[key] for key in traits.reads if key not in traits.weights})
    outputs = late.Arena({key: tensors[key] for key in traits.writes})
    ins = inputs.values | {key: tensors[key] for key in traits.weights}
    attrs = attributes(name, torch.bfloat16)

    def launch() -> None:
        kernel(name).launch(outputs.values, ins, attrs, pdl=True)

    outputs.words.fill_(late.POISON)
    torch.cuda.synchronize()
    launch()  # on an idle device: nothing that it could be too early for
    expected = outputs.words.clone()
    assert (expected != late.POISON).any()
    assert late.races(inputs, outputs, expected, launch, REPLAYS_OF_A_KERNEL) == (0, 0)


@pytest.mark.parametrize("waits", [True, False])
def test_the_harness_catches_a_kernel_without_a_wait(waits):
    values = torch.arange(1 << 14, dtype=torch.int32, device="cuda")
    inputs, outputs = late.Arena({"x": values}), late.Arena({"y": values})
    expected = outputs.words.clone()

    def launch() -> None:
        grid = (values.numel() // late.CHUNK,)
        late.careless_copy[grid](inputs.words, outputs.words, values.numel(), late.CHUNK, waits, launch_pdl=True)

    early, wrong = late.races(inputs, outputs, expected, launch, REPLAYS_OF_A_KERNEL)
    # It copies poison, which the producer does not take for an early write; what is left is wrong in every replay.
    assert (early, wrong) == ((0, 0) if waits else (0, REPLAYS_OF_A_KERNEL))


def test_the_harness_catches_an_early_write():
    values = torch.arange(1 << 14, dtype=torch.int32, device="cuda")
    inputs, outputs = late.Arena({"x": values}), late.Arena({"y": values})
    expected = outputs.words.clone()

    def launch() -> None:
        grid = (values.numel() // late.CHUNK,)
        late.careless_copy[grid](values, outputs.words, values.numel(), late.CHUNK, False, launch_pdl=True)

    early, wrong = late.races(inputs, outputs, expected, launch, REPLAYS_OF_A_KERNEL)
    assert early == REPLAYS_OF_A_KERNEL * values.numel() and wrong == 0


@cache
def _compiled_ahead() -> None:
    """All kernels of CHAINS, both ways, in worker processes: one after the other they take longer than the replays."""
    compile_ahead([case[:3] for case in CHAINS], workers=min(8, os.cpu_count() or 1))


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """What torch.empty and torch.empty_strided return is filled with poison first."""
    empty, empty_strided = torch.empty, torch.empty_strided

    def poisoned(tensor: Tensor) -> Tensor:
        # A dense tensor of any strides, as the flat memory that it is.
        torch.as_strided(tensor, (tensor.numel(),), (1,)).view(torch.uint8).fill_(0xFF)
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *args, **kwargs: poisoned(empty(*args, **kwargs)))
        patch.setattr(torch, "empty_strided", lambda *args, **kwargs: poisoned(empty_strided(*args, **kwargs)))
        yield


def _name(case: Any) -> str:
    sizes, tokens, backward, replays = case
    direction = "backward" if backward else "forward"
    return f"{direction}-E{sizes.experts}-T{tokens}-{replays}x"


@pytest.mark.parametrize("case", CHAINS, ids=_name)
def test_a_chain_replayed_beside_traffic_equals_its_twin_without_pdl(case):
    sizes, tokens, backward, replays = case
    _compiled_ahead()
    program = backward_program if backward else forward_program
    texts = [program(sizes, pdl=pdl).to_text() for pdl in (True, False)]
    variants = program(sizes).variants
    variant = next(v for v in variants if v.max_tokens is None or tokens <= v.max_tokens)
    tensors = inputs_of(sizes, tokens, weights_of(sizes, "cuda"), "cuda", backward=backward)
    wrong = torch.zeros((), dtype=torch.int32, device="cuda")

    def both() -> None:
        on, off = (torch.ops.moepdl.chain(tensors, text) for text in texts)
        for mine, twin in zip(on, off, strict=True):
            wrong.add_((mine != twin).any())

    for _ in range(3):  # watched, bound, launched by the driver
        both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    # The memory of a bound chain is all allocated ahead of its first launch, so that is where it is poisoned.
    with torch.cuda.graph(graph), poisoned_allocations():
        both()
    planned = sum(launch.pdl for launch in variant.launches)
    assert sum(edge.programmatic for edge in read_edges(graph)) == planned > 0
    graph.instantiate()
    wrong.zero_()
    traffic = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    beside = torch.cuda.Stream()
    for index in range(replays):
        if index % 4 == 0:
            with torch.cuda.stream(beside):
                traffic.add_(1)
        graph.replay()
    torch.cuda.synchronize()
    assert int(wrong) == 0, f"{int(wrong)} results of {replays} replays differ from the twin's"
