"""The launches of a chain, each by itself, over several inputs of one T; and light CUDA graphs of calls. For timing.

A chain's own operator launches all of it on one input. To time one launch, its operands have to be there: buffers for
all that the chain writes are laid out once for each input, and every launch can then be made again, with another tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import moe_compiler.runtime_kernels.register  # noqa: F401 - defines the operators
from moe_compiler.runtime_kernels.chain.prepared import Value, flatten, prepare
from moe_compiler.runtime_kernels.tiles import Tile

__all__ = ["ChainRuns", "light_graph"]


class ChainRuns:
    """The launches of the variant of a chain for T tokens, on each input.

    text: the chain's program. runs: the operands of each input, all of the same T.
    """

    def __init__(self, text: str, runs: Sequence[Sequence[Tensor]]) -> None:
        prepared = prepare(text)
        self._values: list[dict[str, Value]] = []
        for tensors in runs:
            values, sizes = prepared.bind(tensors)
            self.variant = prepared.variant(sizes)
            for launch in self.variant.launches:
                for _, buffer in launch.outs:
                    values[buffer.name] = buffer.allocate(sizes, values, tensors[0].device)
            self._values.append(values)
        for run in range(len(self)):
            for index in range(len(self.variant.launches)):
                self.launch(index, run)

    def __len__(self) -> int:
        """Inputs."""
        return len(self._values)

    def index(self, kernel: str) -> int:
        """The first launch of a kernel."""
        return next(i for i, launch in enumerate(self.variant.launches) if launch.kernel.name == kernel)

    def launch(self, index: int, run: int, tile: Tile | None = None) -> None:
        """Make one launch on one of the inputs; tile: None for its own."""
        launch, values = self.variant.launches[index], self._values[run]
        outs = {parameter: values[buffer.name] for parameter, buffer in launch.outs}
        ins = {parameter: None if name is None else values[name] for parameter, name in launch.ins}
        options: dict[str, Any] = {} if tile is None else {"tile": tile}
        launch.kernel.launch(outs, ins, launch.attrs, pdl=launch.pdl, **options)

    def results(self, index: int) -> list[Tensor]:
        """What a launch writes on the first input."""
        return flatten([self._values[0][buffer.name] for _, buffer in self.variant.launches[index].outs])


def light_graph(calls: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of what `calls()` launches, which it must have launched before; replayed once.

    What `torch.cuda.graph` does, without its collection of garbage and emptying of caches, which take longer than a
    short measurement. Other threads may allocate meanwhile.
    """
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            calls()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)
    graph.replay()
    return graph
