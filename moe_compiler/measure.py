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

from moe_compiler.block_program import BlockSizes, backward_program, forward_program, inputs_of, saving_text, weights_of
from moe_compiler.chain_runs import ChainRuns, light_graph
from moe_compiler.runtime_kernels.chain.launcher import run as run_chain
from moe_compiler.runtime_kernels.chain.prepared import prepare

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
    graph = light_graph(lambda: [call(i) for _ in range(repeat) for i in range(inputs)])
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
    operands = [inputs_of(sizes, tokens, weights, "cuda", backward=backward) for _ in range(count)]
    runs = ChainRuns(_text(sizes, backward, pdl=False), operands)
    times = []
    for index, launch in enumerate(runs.variant.launches if launches else ()):

        def one(run: int, index: int = index) -> None:
            runs.launch(index, run)

        once = graph_us(one, count, replays=3)
        repeat = max(1, min(16, int(400 / (once * count + 1))))
        times.append((launch.kernel.name, graph_us(one, count, repeat=repeat)))
    found = {}
    for name, pdl in (("plain", False), ("pdl", True)) if chains else ():
        text = _text(sizes, backward, pdl)
        found[name] = graph_us(lambda run, text=text: torch.ops.moepdl.chain(operands[run], text), count)  # type: ignore[misc]
    programmatic = prepare(_text(sizes, backward)).variant_of(tokens).launches
    return Measured(tuple(times), found, sum(launch.pdl for launch in programmatic))


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
        weights = weights_of(sizes, "cpu")
        run_chain(inputs_of(sizes, tokens, weights, "cpu", backward=backward), _text(sizes, backward, pdl))
        if backward:  # `inputs_of` launches it on a GPU
            run_chain(inputs_of(sizes, tokens, weights, "cpu"), saving_text(sizes))

    began = time.perf_counter()
    with Ahead(workers).open() as ahead:
        ahead.compile(partial(run, *job, pdl) for job in jobs for pdl in ways(job[0]))
    return time.perf_counter() - began
