"""Device time of a chain's launches, one by one and as a whole, for calibration and benchmarks. Needs a CUDA GPU.

A time is that of one CUDA graph of calls over different inputs, replayed, divided by the calls: the median of the
replays, in microseconds. Inputs rotate so that no call finds its activations in the cache; their weights are one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import moe_compiler.runtime_kernels.register  # noqa: F401 - defines the operators
from moe_compiler.block_program import BlockSizes, backward_program, forward_program, inputs_of, weights_of
from moe_compiler.runtime_kernels.chain.launcher import run as run_chain
from moe_compiler.runtime_kernels.chain.prepared import Value, prepare

__all__ = ["Measured", "compile_ahead", "graph_us", "measure_block"]


@dataclass(frozen=True)
class Measured:
    """launches: (kernel, microseconds) of each launch by itself, launched plainly; chain_us by "pdl" and "plain".

    programmatic: launches of the "pdl" chain that carry the attribute.
    """

    launches: tuple[tuple[str, float], ...]
    chain_us: dict[str, float]
    programmatic: int


def graph_us(call: Callable[[int], object], inputs: int, *, replays: int = 12, repeat: int = 1) -> float:
    """Median microseconds a call of `call(i)`, i in range(inputs), `repeat` rounds of them in one graph."""
    for i in range(inputs):
        call(i)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(0)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeat):
            for i in range(inputs):
                call(i)
    times = []
    for turn in range(replays + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if turn > 1:
            times.append(begin.elapsed_time(end) * 1e3 / (inputs * repeat))
    return statistics.median(times)


def measure_block(
    sizes: BlockSizes,
    tokens: int,
    weights: dict[str, list[Tensor]],
    *,
    backward: bool = False,
    launches: bool = True,
    chains: bool = True,
) -> Measured:
    """Times of the forward or the backward chain of a block of these sizes for T tokens, on the current device.

    launches, chains: what is timed, each launch by itself and the whole.
    """
    count = 1 if backward else 8 if tokens < 2048 else 2
    prepared = prepare(_text(sizes, backward))
    operands = [inputs_of(sizes, tokens, weights, "cuda", backward=backward) for _ in range(count)]
    variant = prepared.variant(prepared.bind(operands[0])[1])
    runs: list[dict[str, Value]] = []
    for tensors in operands:
        values, numbers = prepared.bind(tensors)
        for launch in variant.launches:
            for _, buffer in launch.outs:
                values[buffer.name] = buffer.allocate(numbers, values, tensors[0].device)
        runs.append(values)

    def made(index: int, run: int) -> None:
        launch, values = variant.launches[index], runs[run]
        outs = {parameter: values[buffer.name] for parameter, buffer in launch.outs}
        ins = {parameter: None if name is None else values[name] for parameter, name in launch.ins}
        launch.kernel.launch(outs, ins, launch.attrs, pdl=False)

    for run in range(count):
        for index in range(len(variant.launches)):
            made(index, run)
    times = []
    for index, launch in enumerate(variant.launches if launches else ()):
        once = graph_us(lambda run, index=index: made(index, run), count, replays=3)  # type: ignore[misc]
        repeat = max(1, min(16, int(400 / (once * count + 1))))
        times.append(
            (launch.kernel.name, graph_us(lambda run, index=index: made(index, run), count, repeat=repeat))  # type: ignore[misc]
        )
    found = {}
    for name, pdl in (("plain", False), ("pdl", True)) if chains else ():
        text = _text(sizes, backward, pdl)
        found[name] = graph_us(lambda run, text=text: torch.ops.moepdl.chain(operands[run], text), count)  # type: ignore[misc]
    return Measured(tuple(times), found, sum(launch.pdl for launch in variant.launches))


def _text(sizes: BlockSizes, backward: bool, pdl: bool = True) -> str:
    return (backward_program if backward else forward_program)(sizes, pdl=pdl).to_text()


def compile_ahead(
    jobs: Sequence[tuple[BlockSizes, int, bool]],
    *,
    workers: int,
    ways: Callable[[BlockSizes], tuple[bool, ...]] = lambda sizes: (False, True),
) -> float:
    """Compile the kernels of these (sizes, T, backward) in worker processes, each once; seconds that it took.

    ways: of a block, whether it is launched plainly (False), programmatically (True) or both. Nothing is launched here,
    and no memory of the device is taken but the workers' contexts.
    """
    from moe_compiler.ahead import Ahead

    def run(sizes: BlockSizes, tokens: int, backward: bool, pdl: bool) -> None:
        operands = inputs_of(sizes, tokens, weights_of(sizes, "cpu"), "cpu", backward=backward)
        run_chain(operands, _text(sizes, backward, pdl))

    began = time.perf_counter()
    with Ahead(workers).open() as ahead:
        ahead.compile(partial(run, *job, pdl) for job in jobs for pdl in ways(job[0]))
    return time.perf_counter() - began
