"""Starting device kernels: operands as kernels take them, handles compiled once, tiles.

A launch is prepared so that little is left to do for a call: everything that depends on the model (sizes, strides,
layouts) is a constant of the compiled kernel, and the compiled handle is found by one dictionary lookup, past the
binder of `JITFunction`. Nothing here synchronises with the device, and everything can be captured in a CUDA graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as LaidOutDescriptor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_compiler.runtime_kernels.activations import parse_activation
from moe_compiler.runtime_kernels.biases import ExpertBiases, as_columns
from moe_compiler.runtime_kernels.device import write_table_kernel
from moe_compiler.runtime_kernels.tiles import HOPPER_MULTIPROCESSORS, Tile, choose_tile, specialised_fits
from moe_compiler.runtime_kernels.weights import ExpertWeights

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_INT32_LIMIT = 2**31
# What kernels count in 32 bits (pairs, tokens, programs) stays so far below that rounding it up to tiles does not pass.
_MOST = _INT32_LIMIT - 2**20
# As triton's kernels take them, and as Gluon's do, which also name the layout in shared memory.
DESCRIPTORS = (TensorDescriptor, LaidOutDescriptor)
# Addresses that one launch of the table writer takes by value.
_ADDRESSES = 32

_handles: dict[tuple[Any, ...], Any] = {}
# Keys of kernels whose compiled code may not be launched with the PDL attribute.
_refused: set[tuple[Any, ...]] = set()
_record: list[Start] | None = None
_trace: Trace | None = None


class RefusedKernelWarning(UserWarning):
    """A kernel whose compiled code breaks a rule of programmatic launch, and is launched plainly."""


class UnsupportedDtypeError(NotImplementedError):
    """A data type that the device kernels do not compute in; the message names it and those that they do."""


class TooManyError(ValueError):
    """More pairs, tokens or programs than the device kernels count; the message says how many there may be."""


@dataclass(frozen=True)
class Matrix:
    """The weights of one projection as kernels take them.

    operand   the packed tensor as it was given, or the int64 table of the experts' addresses when `table`
    shape     (E, out, in)
    stride    elements from expert to expert (0 with a table); out, inner: strides of a matrix [out, in]
    aligned   every address is a multiple of 16 bytes; wide: offsets inside a matrix pass 32 bits
    turns     rows (out) are those of gate and up in turns
    """

    operand: Tensor
    shape: tuple[int, int, int]
    stride: int
    out: int
    inner: int
    table: bool
    aligned: bool
    wide: bool
    turns: bool = False


@dataclass(frozen=True)
class Vector:
    """The biases of one projection as kernels take them: `Matrix` for vectors; operand None where there are none."""

    operand: Tensor | None
    stride: int
    step: int
    table: bool


NO_BIAS = Vector(None, 0, 0, False)


@dataclass(frozen=True)
class Start:
    """The arguments of one call of `start`, as `recording` collects them."""

    kernel: Any
    programs: int
    operands: tuple[Any, ...]
    numbers: tuple[int, ...]
    constants: dict[str, Any]
    pdl: bool
    warps: int
    stages: int
    registers: int | None = None


@dataclass
class Trace:
    """What `tracing` saw: the launches that were made, and the memory that they used besides their operands.

    launches    (compiled handle, Start) of each
    scratch     temporary memory that a launch asked for with `scratch`; what it holds before is of no account
    constants   tensors that hold the same values as long as the weights stay where they are
    repeatable  whether repeating just these launches does the same again
    """

    launches: list[tuple[Any, Start]] = field(default_factory=list)
    scratch: list[Tensor] = field(default_factory=list)
    constants: list[Tensor] = field(default_factory=list)
    repeatable: bool = True


@contextmanager
def tracing() -> Iterator[Trace]:
    """Note the launches that are made, so that they can be made again without all that leads to them."""
    global _trace
    previous, _trace = _trace, Trace()
    try:
        yield _trace
    finally:
        _trace = previous


def scratch(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory for a launch that writes it in one kernel and reads it in the next."""
    tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
    if _trace is not None:
        _trace.scratch.append(tensor)
    return tensor


@contextmanager
def recording() -> Iterator[list[Start]]:
    """Collect the starts of launches instead of executing them, to compile or inspect them without a GPU.

    Operands may then be on any device; those that are not on a CUDA device are launched as on Hopper.
    """
    global _record
    previous, _record = _record, []
    try:
        yield _record
    finally:
        _record = previous


def is_recording() -> bool:
    """Whether launches are collected instead of made."""
    return _record is not None


def check_dtype(dtype: torch.dtype, what: str) -> None:
    """Raise UnsupportedDtypeError unless the kernels compute in `dtype`."""
    if dtype not in DTYPES:
        known = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise UnsupportedDtypeError(
            f"{what} is {str(dtype).removeprefix('torch.')}; the CUDA kernels compute in {known}. "
            f"Cast the model to one of these, or run it on the CPU, where float64 is supported"
        )


def triton_dtype(dtype: torch.dtype, what: str) -> tl.dtype:
    """The Triton name of `dtype`. Raises UnsupportedDtypeError."""
    check_dtype(dtype, what)
    return _TRITON_DTYPES[dtype]


def precision(dtype: torch.dtype) -> str:
    """`input_precision` of tile products: what torch would use for a CUDA matmul of `dtype`."""
    if dtype is not torch.float32:
        return "ieee"
    matmul = torch.backends.cuda.matmul
    setting = getattr(matmul, "fp32_precision", None)
    allowed = matmul.allow_tf32 if setting is None else setting == "tf32"
    return "tf32" if allowed else "ieee"


@lru_cache
def capability(device: torch.device) -> int:
    """Compute capability of a CUDA device, as major * 10 + minor. Other devices stand for Hopper (see `recording`)."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least n and at least `least`."""
    return max(1 << (max(n, 1) - 1).bit_length(), least)


def reaches_far(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether offsets inside of a tensor of these sizes and strides pass 32 bits."""
    return sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) >= _INT32_LIMIT


def row_major(matrix: Tensor) -> Tensor:
    """`matrix` itself if its rows are contiguous, else a contiguous copy."""
    return matrix if matrix.stride(1) == 1 or matrix.shape[1] == 1 else matrix.contiguous()


def matrix(tensors: Sequence[Tensor], what: str, *, written: bool = False) -> Matrix:
    """Expert weights, or gradients that are to be `written`, as kernels take them. Raises WeightLayoutError."""
    weights = ExpertWeights(tensors, what)
    check_dtype(weights.dtype, what)
    out, inner = weights.strides
    wide = reaches_far((weights.out, weights.inner), (out, inner))
    shape = (weights.experts, weights.out, weights.inner)
    if weights.is_packed:
        # The tensor itself, not the view of it: a chain that binds its launches knows its operands by identity.
        return Matrix(tensors[0], shape, weights.expert_stride, out, inner, False, True, wide, weights.turns)
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
    if written or _record is not None or torch.cuda.is_current_stream_capturing():
        table = _write_table(tensors)
        if _trace is not None:
            _trace.repeatable = False
    else:
        table = weights.pointers()
        _ready_writer(weights.device)
        if _trace is not None:
            _trace.constants.append(table)
    return Matrix(table, shape, 0, out, inner, True, aligned, wide)


def vector(tensors: Sequence[Tensor] | None, what: str, *, written: bool = False) -> Vector:
    """Expert biases, or gradients that are to be `written`, as kernels take them. Raises WeightLayoutError."""
    if not tensors:
        return NO_BIAS
    biases = ExpertBiases(tensors, what)
    if biases.is_packed:
        check_dtype(biases.dtype, what)
        stored = biases.tensors[0]
        return Vector(tensors[0], stored.stride(0), stored.stride(1), False)
    listed = matrix(as_columns(tensors), what, written=written)
    return Vector(listed.operand, 0, listed.out, True)


def activation_constants(text: str) -> dict[str, Any]:
    """The constants by which kernels know an activation; LIMIT 0 stands for none."""
    rule = parse_activation(text)
    return {"ACTIVATION": rule.name, "ALPHA": rule.alpha, "LIMIT": rule.limit or 0.0, "SHIFT": rule.shift}


def _write_table(tensors: Sequence[Tensor]) -> Tensor:
    """The address table of tensors, written by the device from launch arguments.

    Unlike a copy from host memory it can be captured in a CUDA graph, and nothing must outlive the call. It is a plain
    launch, a full barrier between its neighbours.
    """
    addresses = [tensor.data_ptr() for tensor in tensors]
    addresses += addresses[-1:] * (-len(addresses) % _ADDRESSES)
    table = torch.empty(len(addresses), dtype=torch.int64, device=tensors[0].device)
    for first in range(0, len(addresses) if _record is None else 0, _ADDRESSES):
        some = tuple(addresses[first : first + _ADDRESSES])
        write_table_kernel[(1,)](table[first:], some, COUNT=_ADDRESSES, num_warps=1)
    return table


@lru_cache
def _ready_writer(device: torch.device) -> None:
    """Compile the table writer before a CUDA graph is captured, which must not compile anything."""
    _write_table([torch.empty(16, device=device)])


def box(what: Matrix, rows: int, inner_rows: bool, block: tuple[int, int]) -> Any:
    """A tensor descriptor over the stored rows of all experts, or None where the layout does not allow one.

    rows        stored rows of an expert's matrix (the dimension that is not contiguous)
    inner_rows  whether the stored rows run over `in` (the matrix is kept transposed)
    block       tile sizes (along the stored rows, along the contiguous dimension)
    """
    if what.table or what.operand.element_size() != 2 or capability(what.operand.device) < 90:
        return None
    step, unit = (what.inner, what.out) if inner_rows else (what.out, what.inner)
    tensor, (experts, out, inner) = what.operand, what.shape
    columns = out if inner_rows else inner
    if unit != 1 or step % 8 or step < columns or what.stride != rows * step or tensor.data_ptr() % 16:
        return None
    if max(block) > 256:
        return None
    return TensorDescriptor(tensor, [experts * rows, columns], [step, 1], list(block))


def laid_out(descriptor: TensorDescriptor) -> LaidOutDescriptor:
    """A descriptor of `box` for a kernel that is written in Gluon."""
    block = list(descriptor.block_shape)
    layout = NVMMASharedLayout.get_default_for(block, _TRITON_DTYPES[descriptor.base.dtype])
    return LaidOutDescriptor(descriptor.base, list(descriptor.shape), list(descriptor.strides), block, layout)


def rows_box(rows: Tensor, tile: Tile) -> LaidOutDescriptor:
    """A descriptor over rows [S,C] of a launch for a kernel with specialised warps, which `specialised` allows.

    Unlike those of weights its address changes from run to run.
    """
    return laid_out(TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [tile.rows, tile.depth]))


def specialised(rows: Tensor, depth: int, tile: Tile, experts: int, biases: Sequence[Vector]) -> bool:
    """Whether a kernel with specialised warps can take `rows`, row-major, and these biases (see `specialised`).

    Its matrices must be boxes besides. depth: the columns of rows that one matrix multiplies.
    """
    return (
        capability(rows.device) == 90
        and specialised_fits(tile, depth, experts)
        and rows.element_size() == 2
        and rows.data_ptr() % 16 == 0
        and rows.stride(0) % 8 == 0
        and not any(bias.table for bias in biases)
    )


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device. Other devices stand for Hopper (see `recording`)."""
    if device.type != "cuda":
        return HOPPER_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def tile_for(kernel: str, rows: Tensor, starts: Tensor, sizes: tuple[int, int]) -> Tile:
    """The tile of a kernel that works on `rows`, one a pair, of the experts that `starts` [E+1] divides them among.

    sizes: of its matrices, see `choose_tile`.
    """
    mean_rows = -(-rows.shape[0] // (starts.shape[0] - 1))
    return choose_tile(kernel, rows.dtype, mean_rows, capability(rows.device), sizes)


def start(
    kernel: Any,
    programs: int,
    operands: Sequence[Tensor | TensorDescriptor | LaidOutDescriptor | None],
    numbers: Sequence[int],
    constants: dict[str, Any],
    *,
    pdl: bool,
    warps: int = 4,
    stages: int = 3,
    registers: int | None = None,
) -> Any:
    """Launch `kernel` on the current stream with `programs` programs; return its compiled handle (None if none).

    The kernel's parameters are the operands, then the numbers (int32, not specialised), then the constants in order,
    then PDL, which is also the launch attribute: the device code waits if and only if it is launched so. Raises
    TooManyError.
    """
    if programs == 0:
        return None
    if max(programs, *numbers, 0) > _MOST:
        raise TooManyError(
            f"{kernel.__name__} is to run {programs} programs for sizes of {', '.join(map(str, numbers)) or '-'}; the "
            f"kernels count tokens, (token, expert) pairs and programs up to {_MOST}. Give the model fewer tokens at a "
            f'time; in inference options={{"memory": "low"}} does that'
        )
    if _record is not None:
        arguments = (kernel, programs, tuple(operands), tuple(numbers), constants, pdl, warps, stages, registers)
        _record.append(Start(*arguments))
        return None
    device = driver.active.get_current_device()
    key: list[Any] = [kernel, device, pdl, warps, stages, registers, *constants.values()]
    fast: list[Any] = []
    for operand in operands:
        if operand is None:
            key.append(None)
            fast.append(None)
        elif isinstance(operand, DESCRIPTORS):
            key.append((operand.base.dtype, *operand.block_shape))
            fast.append(operand)
        else:
            address = operand.data_ptr()
            key.append((operand.dtype, address % 16 == 0))
            fast.append(address)
    handle: Any = _handles.get(tuple(key))
    if handle is not None:
        handle[(programs, 1, 1)](*fast, *numbers, *constants.values(), pdl)
        return _traced(handle, kernel, programs, operands, numbers, constants, pdl, warps, stages, registers)
    refused = tuple(key) in _refused
    if not refused:
        handle = _compile(kernel, operands, numbers, constants, pdl, warps, stages, registers)
        refused = pdl and not _waits_as_it_must(handle)
    if refused:
        _refused.add(tuple(key))
        return start(
            kernel, programs, operands, numbers, constants, pdl=False, warps=warps, stages=stages, registers=registers
        )
    handle[(programs, 1, 1)](*fast, *numbers, *constants.values(), pdl)
    _handles[tuple(key)] = handle
    return _traced(handle, kernel, programs, operands, numbers, constants, pdl, warps, stages, registers)


def _compile(
    kernel: Any,
    operands: Sequence[Any],
    numbers: Sequence[int],
    constants: dict[str, Any],
    pdl: bool,
    warps: int,
    stages: int,
    registers: int | None,
) -> Any:
    """The compiled handle of a kernel for these arguments; nothing is launched."""
    expected = list(kernel.arg_names[len(operands) + len(numbers) :])
    if expected != [*constants, "PDL"]:
        raise TypeError(f"{kernel.__name__} takes the constants {expected}, got {[*constants, 'PDL']}")
    options = {"num_warps": warps, "num_stages": stages, "maxnreg": registers, "launch_pdl": pdl}
    return kernel.warmup(*operands, *numbers, **constants, PDL=pdl, grid=(1, 1, 1), **options)


def compile_recorded(start: Start) -> Any:
    """Compile what `recording` collected for the current device, so that a later launch finds it in triton's cache.

    What is launched programmatically is audited too, and the verdict kept beside it. The compiled handle.
    """
    handle = _compile(
        start.kernel,
        start.operands,
        start.numbers,
        start.constants,
        start.pdl,
        start.warps,
        start.stages,
        start.registers,
    )
    if start.pdl:
        from moe_compiler.runtime_kernels.audit import audited

        audited(handle)
    return handle


def _waits_as_it_must(handle: Any) -> bool:
    """Whether the machine code keeps the rules of programmatic launch; if not, a warning says what it does."""
    from moe_compiler.runtime_kernels.audit import audited

    found = audited(handle)
    if not found.ok:
        warnings.warn(
            f"{found.kernel} is launched without PDL: its compiled code breaks a rule of programmatic launch "
            f"({'; '.join(found.problems)}). This is a fault of the kernel or of triton {triton.__version__}",
            RefusedKernelWarning,
            stacklevel=4,
        )
    return found.ok


def _traced(
    handle: Any,
    kernel: Any,
    programs: int,
    operands: Sequence[Any],
    numbers: Sequence[int],
    constants: dict[str, Any],
    pdl: bool,
    warps: int,
    stages: int,
    registers: int | None,
) -> Any:
    if _trace is not None:
        arguments = (kernel, programs, tuple(operands), tuple(numbers), constants, pdl, warps, stages, registers)
        _trace.launches.append((handle, Start(*arguments)))
    return handle
