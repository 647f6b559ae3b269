"""Functions of the CUDA driver that neither torch nor triton offers, through ctypes: graphs are read, kernels started.

Structures and constants are those of the driver API's header, cuda.h, of CUDA 12.4 and newer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any

__all__ = [
    "CAPTURE_RELAXED",
    "CLUSTER_DIMENSION",
    "COOPERATIVE",
    "KERNEL_NODE",
    "PROGRAMMATIC_EDGE",
    "PROGRAMMATIC_STREAM_SERIALIZATION",
    "STREAM_NON_BLOCKING",
    "DriverError",
    "EdgeData",
    "KernelNode",
    "LaunchAttribute",
    "LaunchConfig",
    "check",
    "function",
    "node_attribute",
    "nodes_of",
    "parameter_sizes",
]

# CUlaunchAttributeID; a kernel node's attributes have the same numbers.
COOPERATIVE = 2
CLUSTER_DIMENSION = 4
PROGRAMMATIC_STREAM_SERIALIZATION = 6
# CUstreamCaptureMode: this thread may do anything meanwhile, and other threads' captures are not disturbed.
CAPTURE_RELAXED = 2
STREAM_NON_BLOCKING = 1
KERNEL_NODE = 0  # CUgraphNodeType
PROGRAMMATIC_EDGE = 1  # CUgraphDependencyType
_INVALID_VALUE = 1


class DriverError(RuntimeError):
    """The driver answered an error, or lacks a function; the message says which."""


class EdgeData(ctypes.Structure):
    """CUgraphEdgeData."""

    _fields_ = (
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    )


class KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("func", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("parameters", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.POINTER(ctypes.c_void_p)),
        ("kern", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute, and with it the 64 bytes of a value by themselves."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("count", ctypes.c_uint),
    )


@lru_cache
def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"the CUDA driver cannot be loaded: {error}") from error


@lru_cache
def function(name: str) -> Callable[..., int]:
    """A function of the driver. Raises DriverError when there is no driver, or it is too old to have it."""
    try:
        return getattr(_library(), name)  # type: ignore[no-any-return]
    except AttributeError:
        raise DriverError(f"the CUDA driver has no {name}: it is older than CUDA 12.4") from None


def check(status: int, what: str) -> None:
    """Raise DriverError unless the driver answered success when asked for `what`."""
    if status != 0:
        raise DriverError(f"the CUDA driver answered {_name(status)} when asked to {what}")


def _name(status: int) -> str:
    text = ctypes.c_char_p()
    with suppress(DriverError):
        function("cuGetErrorName")(ctypes.c_int(status), ctypes.byref(text))
    return f"error {status}" + (f" ({text.value.decode()})" if text.value else "")


def parameter_sizes(handle: int) -> list[int]:
    """Sizes in bytes of the parameters of the kernel with this CUfunction. Raises DriverError."""
    ask = function("cuFuncGetParamInfo")
    sizes: list[int] = []
    while True:
        offset, size = ctypes.c_size_t(0), ctypes.c_size_t(0)
        index = ctypes.c_size_t(len(sizes))
        status = ask(ctypes.c_void_p(handle), index, ctypes.byref(offset), ctypes.byref(size))
        if status == _INVALID_VALUE:
            return sizes
        check(status, "tell a kernel's parameters")
        sizes.append(size.value)


def nodes_of(graph: Any) -> list[int]:
    """The handles of a graph's nodes, in no order. Raises DriverError."""
    get, count = function("cuGraphGetNodes"), ctypes.c_size_t(0)
    check(get(graph, None, ctypes.byref(count)), "count a graph's nodes")
    nodes = (ctypes.c_void_p * count.value)()
    check(get(graph, nodes, ctypes.byref(count)), "list a graph's nodes")
    return [node or 0 for node in nodes]


def node_attribute(node: int, attribute: int) -> list[int]:
    """The value of a kernel node's attribute as 32-bit words. Raises DriverError."""
    value = (ctypes.c_uint * 16)()
    status = function("cuGraphKernelNodeGetAttribute")(
        ctypes.c_void_p(node), ctypes.c_int(attribute), ctypes.byref(value)
    )
    check(status, "tell an attribute of a kernel node")
    return list(value)
