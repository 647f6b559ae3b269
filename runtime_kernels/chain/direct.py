"""Launches made by the driver alone: all arguments lie ready in memory, and only addresses change from run to run.

A launch through triton goes through Python for each argument, and encodes a tensor descriptor anew each time. Here what
the kernel is given is read off once: the launch is captured by the driver, unexecuted, with a mark in the place of
each address that changes, and the captured node says which bytes the kernel's parameters are. From then on a run
writes its addresses into one array, which the parameters of all launches point into, gives the tensor descriptors of
activations theirs, and calls cuLaunchKernelEx.

What the driver does not tell is not guessed: `prepare` then returns None, and the launches stay triton's.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from moe_compiler.runtime_kernels import cuda_driver as cuda

__all__ = ["Direct", "Launch", "Prepared", "capture_stream", "mark", "prepare", "slot_of"]

# No address: those of devices have 48 bits or fewer. Yet one that the driver puts into a descriptor, which has 57.
_MARK = 0xA5A5A5 << 32
# A descriptor's memory begins at a multiple of 16 bytes.
_SPACING = 16
# A tensor descriptor lies at a multiple of 64 bytes, by the driver's rule; a compiler may ask for 128.
_ALIGNMENT = 128
_DESCRIPTOR = 128


def mark(slot: int) -> int:
    """What stands for the address of a slot where a launch is only looked at."""
    return _MARK + slot * _SPACING


def slot_of(value: int) -> int | None:
    """The slot that a mark stands for; None for what is no mark."""
    return (value - _MARK) // _SPACING if value & ~0xFFFFFFFF == _MARK else None


@dataclass(frozen=True)
class Prepared:
    """One launch as the driver makes it: its configuration, the kernel's CUfunction, where its parameters lie, their
    sizes in bytes, which of them are descriptors of what slots, and what keeps them alive."""

    config: cuda.LaunchConfig
    function: int
    parameters: Any
    sizes: tuple[int, ...]
    boxes: tuple[tuple[int, int], ...]
    copies: _Copies

    def content(self, parameters: Any = None) -> list[bytes]:
        """The parameters themselves, as they are now: this launch's, or those of another one of the same kernel."""
        places = self.parameters if parameters is None else parameters
        return [ctypes.string_at(places[index], size) for index, size in enumerate(self.sizes)]


class Direct:
    """A sequence of launches. Call it with the addresses of all slots and the handle of a stream.

    launching: the index of the launch that was made last. slots: how many addresses it takes. lock: who holds it may
    `write`.
    """

    def __init__(self, launches: Sequence[Prepared], memory: Any) -> None:
        self.launching = 0
        self.launches = tuple(launches)
        self.slots = len(memory)
        self._memory = memory
        self._stream = 0
        self.lock = threading.Lock()
        self._launch, self._replace = (cuda.function(n) for n in ("cuLaunchKernelEx", "cuTensorMapReplaceAddress"))
        self._boxes = [
            (ctypes.c_void_p(launch.parameters[index]), slot) for launch in launches for index, slot in launch.boxes
        ]
        self._calls = [
            (ctypes.byref(launch.config), ctypes.c_void_p(launch.function), launch.parameters, None)
            for launch in launches
        ]

    def write(self, addresses: list[int]) -> None:
        """Put the addresses of all slots where the parameters point to. Only with the lock. Raises DriverError."""
        self._memory[: self.slots] = addresses
        for place, slot in self._boxes:
            status = self._replace(place, ctypes.c_void_p(addresses[slot]))
            if status:
                cuda.check(status, "give a tensor descriptor its address")

    def __call__(self, addresses: list[int], stream: int) -> None:
        """Raises cuda_driver.DriverError, naming the driver's answer."""
        launch = self._launch
        # Another thread may run the same chain, on a stream of its own: the driver has read all it needs on return.
        with self.lock:
            self.write(addresses)
            if stream != self._stream:
                self._stream = stream
                for prepared in self.launches:
                    prepared.config.stream = stream
            for index, call in enumerate(self._calls):
                status = launch(*call)
                if status:
                    self.launching = index
                    cuda.check(status, "launch a kernel")


@dataclass(frozen=True)
class Launch:
    """One launch as triton makes it.

    make      makes it, given the addresses of all slots and the handle of a stream
    function  the kernel's CUfunction
    given     the slots whose addresses are parameters of it, each as often as it is one
    pdl       whether it is launched programmatically
    boxes     (number among its descriptors, slot) of each tensor descriptor whose address changes
    """

    make: Callable[[list[int], int], None]
    function: int
    given: Sequence[int]
    pdl: bool
    boxes: Sequence[tuple[int, int]] = ()


def prepare(launches: Sequence[Launch], slots: int) -> Direct | None:
    """The launches as the driver makes them, or None when it cannot be told what they are.

    Nothing is executed. The current stream must not be capturing.
    """
    marks = [mark(slot) for slot in range(slots)]
    memory = (ctypes.c_uint64 * slots)()
    prepared = []
    try:
        with capture_stream() as stream:
            for launch in launches:
                with _captured(launch, marks, stream) as node:
                    found = _read(node, launch, memory)
                if found is None:
                    return None
                prepared.append(found)
        return Direct(prepared, memory)
    except RuntimeError:
        return None


@contextmanager
def capture_stream() -> Iterator[Any]:
    """A stream to capture on."""
    stream = ctypes.c_void_p()
    cuda.check(
        cuda.function("cuStreamCreate")(ctypes.byref(stream), ctypes.c_uint(cuda.STREAM_NON_BLOCKING)),
        "create a stream",
    )
    try:
        yield stream
    finally:
        cuda.function("cuStreamDestroy_v2")(stream)


@contextmanager
def _captured(launch: Launch, marks: list[int], stream: Any) -> Iterator[int]:
    """The node of a launch that is captured instead of made. Raises DriverError."""
    begin, end = cuda.function("cuStreamBeginCapture_v2"), cuda.function("cuStreamEndCapture")
    cuda.check(begin(stream, ctypes.c_int(cuda.CAPTURE_RELAXED)), "begin to capture a launch")
    graph = ctypes.c_void_p()
    try:
        try:
            launch.make(marks, stream.value or 0)
        finally:
            status = end(stream, ctypes.byref(graph))
        cuda.check(status, "end the capture of a launch")
        nodes = cuda.nodes_of(graph)
        if len(nodes) != 1:
            raise cuda.DriverError(f"a launch was captured as {len(nodes)} nodes")
        yield nodes[0]
    finally:
        if graph.value:
            cuda.function("cuGraphDestroy")(graph)


def _read(node: int, launch: Launch, memory: Any) -> Prepared | None:
    """A captured launch, or None if it is not what `launch` says.

    A parameter that holds a mark is to be read from `memory`, at the mark's slot; the others are copied.
    """
    read = cuda.KernelNode()
    get = cuda.function("cuGraphKernelNodeGetParams_v2")
    cuda.check(get(ctypes.c_void_p(node), ctypes.byref(read)), "tell a node's parameters")
    # A launch in clusters, or one whose programs wait for each other, needs attributes that are not set here.
    if cuda.node_attribute(node, cuda.CLUSTER_DIMENSION)[0] > 1 or cuda.node_attribute(node, cuda.COOPERATIVE)[0]:
        return None
    sizes = cuda.parameter_sizes(launch.function)
    if not read.parameters or read.extra:
        return None
    kept = _Copies(sizes)
    pointers = (ctypes.c_void_p * len(sizes))()
    given = []
    for index, size in enumerate(sizes):
        source = read.parameters[index]
        slot = slot_of(ctypes.c_uint64.from_address(source).value) if size == 8 else None
        if slot is not None:
            given.append(slot)
            pointers[index] = ctypes.addressof(memory) + 8 * slot
        else:
            pointers[index] = kept.copy(source, size)
    if sorted(given) != sorted(launch.given):
        return None
    descriptors = [index for index, size in enumerate(sizes) if size == _DESCRIPTOR]
    if any(number >= len(descriptors) for number, _ in launch.boxes):
        return None
    boxes = tuple((descriptors[number], slot) for number, slot in launch.boxes)
    if not all(_describes(pointers[index] or 0, mark(slot)) for index, slot in boxes):
        return None
    config = cuda.LaunchConfig(grid=read.grid, block=read.block, shared=read.shared)
    if launch.pdl:
        attribute = cuda.LaunchAttribute(id=cuda.PROGRAMMATIC_STREAM_SERIALIZATION)
        attribute.value[0] = 1
        config.attributes = ctypes.pointer(attribute)
        config.count = 1
    return Prepared(config, launch.function, pointers, tuple(sizes), boxes, kept)


def _describes(place: int, address: int) -> bool:
    """Whether a tensor descriptor of memory at `address` lies at `place`: to give it that address changes nothing."""
    before = ctypes.string_at(place, _DESCRIPTOR)
    replace = cuda.function("cuTensorMapReplaceAddress")
    cuda.check(replace(ctypes.c_void_p(place), ctypes.c_void_p(address)), "give a tensor descriptor its address")
    return ctypes.string_at(place, _DESCRIPTOR) == before


class _Copies:
    """Memory for the parameters of one launch, each aligned as a tensor descriptor must be."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._memory = (ctypes.c_ubyte * (sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes) + _ALIGNMENT))()
        self._next = -(-ctypes.addressof(self._memory) // _ALIGNMENT) * _ALIGNMENT

    def copy(self, source: int, size: int) -> int:
        """The address of a copy of `size` bytes at the address `source`."""
        place = self._next
        ctypes.memmove(place, source, size)
        self._next += -(-size // _ALIGNMENT) * _ALIGNMENT
        return place
