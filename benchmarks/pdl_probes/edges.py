"""P6: which edges of a captured graph are programmatic when something stands before an attributed launch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.pdl_probes.kernels import Memory, reader, replayed, writer
from moe_compiler.graph_edges import GraphEdge, read_edges
from moe_compiler.runtime_kernels import cuda_driver


def _join(m: Memory) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        m.other.add_(1)
    torch.cuda.current_stream().wait_stream(side)


def _memset(m: Memory) -> None:
    """The driver's memset, which makes a memset node; a fill of torch's is a kernel."""
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    target = ctypes.c_uint64(m.other.data_ptr())
    status = cuda_driver.function("cuMemsetD32Async")(target, 0, ctypes.c_size_t(m.other.numel()), stream)
    cuda_driver.check(status, "set memory")


def _nothing(m: Memory) -> None:
    pass


# (what stands between producer and consumer, how; is the consumer a cooperative grid)
BETWEEN: tuple[tuple[str, Callable[[Memory], object], bool], ...] = (
    ("nothing", _nothing, False),
    ("a fill (a kernel of torch's)", lambda m: m.other.zero_(), False),
    ("a memset", _memset, False),
    ("a copy", lambda m: m.other.copy_(m.data), False),
    ("a join with another stream", _join, False),
    ("nothing; the consumer is a cooperative grid", _nothing, True),
)


def into_last(edges: list[GraphEdge]) -> list[GraphEdge]:
    """The edges into the node that nothing follows: the consumer."""
    sources = {edge.source for edge in edges}
    return [edge for edge in edges if edge.target not in sources]


def row(what: str, between: Callable[[Memory], object], cooperative: bool) -> dict[str, Any]:
    """One row of the table; a launch that the driver refuses is one too."""
    m = Memory()

    def call() -> None:
        writer(m, sleep=0)
        between(m)
        reader(m, wait="before", cooperative=cooperative)

    found: dict[str, Any] = {"probe": "P6", "between producer and consumer": what}
    try:
        edges = read_edges(replayed(call))
    except RuntimeError as error:
        return found | {"edges": 0, "programmatic": 0, "into the consumer": f"refused: {str(error).splitlines()[0]}"}
    last = into_last(edges)
    programmatic = sum(edge.programmatic for edge in last)
    return found | {
        "edges": len(edges),
        "programmatic": sum(edge.programmatic for edge in edges),
        "into the consumer": f"{programmatic} of {len(last)} programmatic",
    }


def rows() -> list[dict[str, Any]]:
    """The whole table, what may be refused last."""
    return [row(*each) for each in BETWEEN]
