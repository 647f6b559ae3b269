"""Read the edges of a captured CUDA graph back from the driver: which of them are programmatic.

A chain's promise can be checked on the machine: capture a call into `torch.cuda.CUDAGraph(keep_graph=True)` and ask
for its edges. An edge is programmatic when the consumer was launched with the PDL attribute and the driver kept it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

__all__ = ["GraphEdge", "read_edges"]

_PROGRAMMATIC = 1  # CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
_KERNEL_NODE = 0  # CU_GRAPH_NODE_TYPE_KERNEL


class _EdgeData(ctypes.Structure):
    _fields_ = [
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    ]


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
    driver = ctypes.CDLL("libcuda.so.1")
    try:
        get_edges = driver.cuGraphGetEdges_v2
    except AttributeError:
        raise RuntimeError("the CUDA driver is older than 12.3 and does not tell the kind of a graph's edges") from None
    handle = ctypes.c_void_p(graph.raw_cuda_graph())
    count = ctypes.c_size_t(0)
    _check(get_edges(handle, None, None, None, ctypes.byref(count)))
    number = count.value
    sources, targets = (ctypes.c_void_p * number)(), (ctypes.c_void_p * number)()
    data = (_EdgeData * number)()
    _check(get_edges(handle, sources, targets, data, ctypes.byref(count)))
    numbers: dict[int | None, int] = {}
    kinds: dict[int | None, int] = {}
    for node in [*sources, *targets]:
        if node not in numbers:
            numbers[node] = len(numbers)
            kind = ctypes.c_int(-1)
            _check(driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)))
            kinds[node] = kind.value
    return [
        GraphEdge(
            source=numbers[sources[i]],
            target=numbers[targets[i]],
            programmatic=data[i].type == _PROGRAMMATIC,
            kernels=kinds[sources[i]] == kinds[targets[i]] == _KERNEL_NODE,
        )
        for i in range(number)
    ]


def _check(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"the CUDA driver answered error {status} when asked for the edges of a graph")
