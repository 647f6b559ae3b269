"""Read the edges of a captured CUDA graph back from the driver: which of them are programmatic.

A chain's promise can be checked on the machine: capture a call into `torch.cuda.CUDAGraph(keep_graph=True)` and ask
for its edges. An edge is programmatic when the consumer was launched with the PDL attribute and the driver kept it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from moe_compiler.runtime_kernels import cuda_driver as cuda

__all__ = ["GraphEdge", "read_edges"]


@dataclass(frozen=True)
class GraphEdge:
    """One dependency of a captured graph; `kernels` says whether both ends are kernel launches."""

    source: int
    target: int
    programmatic: bool
    kernels: bool


def read_edges(graph: torch.cuda.CUDAGraph) -> list[GraphEdge]:
    """The edges of a graph captured with `keep_graph=True`; nodes are numbered by their handles' first appearance.

    Raises RuntimeError when the driver cannot tell (older than CUDA 12.3) or the graph was not kept.
    """
    get_edges = cuda.function("cuGraphGetEdges_v2")
    handle = ctypes.c_void_p(graph.raw_cuda_graph())
    count = ctypes.c_size_t(0)
    what = "tell the edges of a graph"
    cuda.check(get_edges(handle, None, None, None, ctypes.byref(count)), what)
    number = count.value
    sources, targets = (ctypes.c_void_p * number)(), (ctypes.c_void_p * number)()
    data = (cuda.EdgeData * number)()
    cuda.check(get_edges(handle, sources, targets, data, ctypes.byref(count)), what)
    numbers: dict[int | None, int] = {}
    kinds: dict[int | None, int] = {}
    for node in [*sources, *targets]:
        if node not in numbers:
            numbers[node] = len(numbers)
            kind = ctypes.c_int(-1)
            ask = cuda.function("cuGraphNodeGetType")
            cuda.check(ask(ctypes.c_void_p(node), ctypes.byref(kind)), "tell the kind of a graph's node")
            kinds[node] = kind.value
    return [
        GraphEdge(
            source=numbers[sources[i]],
            target=numbers[targets[i]],
            programmatic=data[i].type == cuda.PROGRAMMATIC_EDGE,
            kernels=kinds[sources[i]] == kinds[targets[i]] == cuda.KERNEL_NODE,
        )
        for i in range(number)
    ]
