"""A chain's launches as one graph of the driver's: a run is one call on the host, whatever the number of launches.

Five calls that start a kernel cost the host five times what one costs, and more than what is left to do around them.
The launches of a `Direct` are therefore captured once, unexecuted, into a graph that keeps their order and their
programmatic edges. A run with the addresses of the run before launches it as it is; with others each node is first
given its parameters anew, which is far cheaper than a launch. What the driver has enqueued keeps its own parameters,
and it runs the launches of one graph one after another, whatever their streams.

In a stream that is being captured the launches are made one by one: the graph that is captured then holds them, not a
graph within a graph.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from moe_compiler.runtime_kernels import cuda_driver as cuda
from moe_compiler.runtime_kernels.chain.direct import Direct, Prepared, capture_stream, mark

__all__ = ["LaunchGraph", "prepare_graph"]


class LaunchGraph:
    """The launches of a Direct. Call it with the addresses of all slots and the handle of a stream."""

    def __init__(
        self, direct: Direct, graph: Any, executable: Any, nodes: Sequence[tuple[int, cuda.KernelNode]]
    ) -> None:
        self._direct = direct
        self._graph, self._executable = graph, executable
        self._nodes = tuple(nodes)
        self._set, self._launch = (cuda.function(n) for n in ("cuGraphExecKernelNodeSetParams_v2", "cuGraphLaunch"))
        self._updates = [(executable, ctypes.c_void_p(node), ctypes.byref(told)) for node, told in self._nodes]
        self._current: list[int] | None = None

    def __call__(self, addresses: list[int], stream: int) -> None:
        """Raises cuda_driver.DriverError, naming the driver's answer."""
        with self._direct.lock:
            if addresses != self._current:
                self._current = None
                self._direct.write(addresses)
                for update in self._updates:
                    status = self._set(*update)
                    if status:
                        cuda.check(status, "give a kernel of a graph its parameters")
                self._current = addresses
            status = self._launch(self._executable, ctypes.c_void_p(stream))
            if status:
                cuda.check(status, "launch a graph of kernels")

    def __del__(self) -> None:
        # At the end of the process this module's names may be gone, and the driver too: there is nothing left to free.
        if cuda is None or suppress is None:
            return
        with suppress(cuda.DriverError, TypeError, AttributeError):
            cuda.function("cuGraphExecDestroy")(self._executable)
            cuda.function("cuGraphDestroy")(self._graph)


def prepare_graph(direct: Direct) -> LaunchGraph | None:
    """The launches of `direct` as a graph, or None where the driver does not tell which node is which launch.

    Nothing is executed. The current stream must not be capturing.
    """
    graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
    try:
        with capture_stream() as stream:
            begin, end = cuda.function("cuStreamBeginCapture_v2"), cuda.function("cuStreamEndCapture")
            cuda.check(begin(stream, ctypes.c_int(cuda.CAPTURE_RELAXED)), "begin to capture launches")
            try:
                direct([mark(slot) for slot in range(direct.slots)], stream.value or 0)
            finally:
                status = end(stream, ctypes.byref(graph))
            cuda.check(status, "end the capture of launches")
        nodes = _matched(direct.launches, cuda.nodes_of(graph))
        if nodes is not None:
            instantiate = cuda.function("cuGraphInstantiateWithFlags")
            cuda.check(instantiate(ctypes.byref(executable), graph, ctypes.c_ulonglong(0)), "instantiate a graph")
            return LaunchGraph(direct, graph, executable, nodes)
    except RuntimeError:
        pass
    if graph.value:
        cuda.function("cuGraphDestroy")(graph)
    return None


def _matched(launches: Sequence[Prepared], nodes: Sequence[int]) -> list[tuple[int, cuda.KernelNode]] | None:
    """Each node with what it is to be told at an update, or None unless each is one of the launches.

    A graph's nodes come in no order, and two launches may be of one kernel; but the marks in their parameters differ,
    or they are the same launch twice.
    """
    if len(nodes) != len(launches):
        return None
    rest = [(launch, launch.content()) for launch in launches]
    found = []
    for node in nodes:
        told = cuda.KernelNode()
        get = cuda.function("cuGraphKernelNodeGetParams_v2")
        cuda.check(get(ctypes.c_void_p(node), ctypes.byref(told)), "tell a node's parameters")
        for index, (launch, content) in enumerate(rest):
            if told.func == launch.function and content == launch.content(told.parameters):
                told.parameters = ctypes.cast(launch.parameters, ctypes.POINTER(ctypes.c_void_p))
                found.append((node, told))
                del rest[index]
                break
        else:
            return None
    return found
