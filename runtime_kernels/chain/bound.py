"""A chain bound to its weights and sizes: the launches of one run, to be made again with little left to do.

What leads to a launch (layouts, tiles, tensor descriptors, the handle of the compiled kernel) depends only on the
sizes, strides and dtypes of the operands, on where the weights are, and on which addresses are aligned. The first run
with given ones is watched by a `Binder`; a later run allocates the outputs and one block of memory for everything in
between, puts the addresses into the noted arguments and starts the kernels: by the driver alone where that can be, all
in one call (`graph`) or one by one (`direct`), else through triton. Where that would not be the same again (an
operand had to be copied, a table of addresses is written at each call) nothing is bound, and every run goes the long
way.

A bound chain holds no tensor but tables of the weights' addresses. Weights that move are freed, and seen: their
addresses are in the key under which the caller keeps it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from moe_compiler.runtime_kernels.chain import direct
from moe_compiler.runtime_kernels.chain.graph import LaunchGraph, prepare_graph
from moe_compiler.runtime_kernels.chain.memory import ALIGNMENT
from moe_compiler.runtime_kernels.launching import DESCRIPTORS, Start, Trace


@dataclass
class _Start:
    """One launch: `arguments` with the addresses at `places` still to be put in, from these slots.

    boxes    the descriptors whose address is still to be put in: (place, its number among all descriptors, slot)
    scratch  whether triton allocates memory for the kernel at each launch
    """

    kernel: str
    run: Callable[..., None]
    function: Any
    metadata: Any
    programs: int
    arguments: list[Any]
    places: list[tuple[int, int]]
    boxes: list[tuple[int, int, int]]
    pdl: bool
    scratch: bool

    def __call__(self, addresses: list[int], stream: int) -> None:
        """Launch through triton."""
        arguments = self.arguments.copy()
        for place, slot in self.places:
            arguments[place] = addresses[slot]
        for place, _, slot in self.boxes:
            arguments[place] = _at(arguments[place], addresses[slot])
        self.run(self.programs, 1, 1, stream, self.function, self.metadata, None, None, None, *arguments)


@dataclass
class _Block:
    """Memory that a run allocates: its size in bytes, and the first and the last step that uses it."""

    size: int
    first: int
    last: int


class _Address:
    """Stands for a descriptor's tensor, which must not be kept alive."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self._address = address
        self.dtype = dtype

    def data_ptr(self) -> int:
        return self._address


def _at(descriptor: Any, address: int) -> Any:
    """A tensor descriptor that differs only in where its memory is."""
    moved = copy.copy(descriptor)
    moved.base = _Address(address, descriptor.base.dtype)
    return moved


class Bound:
    """The launches of a chain. Call it with the chain's operands; it returns the outputs, written where the caller says
    or into memory of their own.

    tables: what it keeps alive.
    """

    def __init__(
        self,
        starts: Sequence[_Start],
        inputs: Sequence[int],
        outputs: Sequence[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]],
        offsets: Sequence[int],
        size: int,
        rows: Sequence[tuple[int, int]],
        tables: Sequence[Tensor],
    ) -> None:
        self.tables = tuple(tables)
        self._starts = tuple(starts)
        self._at = 0
        self._direct: direct.Direct | None = None
        self._graph: LaunchGraph | None = None
        self._asked = any(start.scratch for start in starts)
        self._inputs = tuple(inputs)
        self._outputs = tuple(outputs)
        self._offsets = tuple(offsets)
        self._size = size
        self._rows = tuple(rows)

    def __call__(self, tensors: Sequence[Tensor], given: list[Tensor] | None = None) -> list[Tensor]:
        device = tensors[0].device
        outputs = given
        if outputs is None:
            outputs = [torch.empty_strided(s, t, dtype=dtype, device=device) for s, t, dtype in self._outputs]
        addresses = [tensors[index].data_ptr() for index in self._inputs]
        addresses += [output.data_ptr() for output in outputs]
        if self._size:
            block = torch.empty(self._size, dtype=torch.uint8, device=device)
            base = block.data_ptr()
            addresses += [base + offset for offset in self._offsets]
        if self._rows:
            addresses += [addresses[slot] + offset for slot, offset in self._rows]
        stream = driver.active.get_current_stream(device.index)
        capturing = torch.cuda.is_current_stream_capturing()
        if not self._asked and not capturing:
            self._asked = True
            self._direct = self._by_the_driver(len(addresses))
            if self._direct is not None and len(self._starts) > 1:
                self._graph = prepare_graph(self._direct)
        if self._graph is not None and not capturing:
            self._graph(addresses, stream)
            return outputs
        if self._direct is not None:
            self._direct(addresses, stream)
            return outputs
        for index, start in enumerate(self._starts):
            self._at = index
            start(addresses, stream)
        return outputs

    @property
    def launching(self) -> str:
        """The kernel that was started last, or all that were started together, for a message about it."""
        if self._graph is not None:
            return ", ".join(start.kernel for start in self._starts)
        return self._starts[self._at if self._direct is None else self._direct.launching].kernel

    def _by_the_driver(self, slots: int) -> direct.Direct | None:
        launches = [
            direct.Launch(
                start, start.function, [slot for _, slot in start.places], start.pdl, [box[1:] for box in start.boxes]
            )
            for start in self._starts
        ]
        return direct.prepare(launches, slots)


def watched() -> bool:
    """Whether a profiler of triton's listens to launches: bound ones would pass it by."""
    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)


class Binder:
    """Watches one run of a chain, step by step, and makes a Bound of it.

    Tensors are told apart by identity while they are alive, so memory that is freed and taken again in the run is no
    source of confusion, and the run needs no more of it than one that nobody watches.
    """

    def __init__(self, trace: Trace, tensors: Sequence[Tensor], are_weights: Sequence[bool]) -> None:
        self._trace = trace
        self._inputs = [index for index, is_weight in enumerate(are_weights) if not is_weight]
        self._weights = {id(t) for t, is_weight in zip(tensors, are_weights, strict=True) if is_weight}
        self._slots = {id(tensors[index]): slot for slot, index in enumerate(self._inputs)}
        self._blocks: list[_Block] = []
        # The slot of a whole tensor and the bytes to the rows of a chunk; as a slot such rows count from -1 down.
        self._rows: list[tuple[int, int]] = []
        self._starts: list[_Start] = []
        self._step = 0
        # Which of two operands a launch was given cannot be told when they are one.
        self._possible = len(self._slots) == len(self._inputs)

    def allocated(self, tensors: Sequence[Tensor]) -> None:
        """Buffers of the step that comes next."""
        for tensor in tensors:
            self._slots[id(tensor)] = len(self._inputs) + len(self._blocks)
            self._blocks.append(_Block(tensor.nbytes, self._step, self._step))

    def cut(self, rows: Sequence[tuple[Tensor, Tensor]]) -> None:
        """The steps that come next are given a part of the rows of whole tensors, (part, whole)."""
        for part, whole in rows:
            if id(whole) not in self._slots:
                self._possible = False
                continue
            self._rows.append((self._slots[id(whole)], part.data_ptr() - whole.data_ptr()))
            self._slots[id(part)] = -len(self._rows)

    def whole(self, rows: Sequence[tuple[Tensor, Tensor]]) -> None:
        """The steps that these parts were for are over."""
        for part, _ in rows:
            self._slots.pop(id(part), None)

    def launched(self) -> None:
        """A step has made its launches."""
        trace = self._trace
        self.allocated(trace.scratch)
        fixed = self._weights | {id(table) for table in trace.constants}
        for handle, start in trace.launches:
            self._note(handle, start, fixed)
        self._possible = self._possible and trace.repeatable and bool(trace.launches)
        self._step += 1
        self.freed(trace.scratch)
        trace.launches.clear()
        trace.scratch.clear()

    def skipped(self) -> None:
        """A step had nothing to do; with other operands of the same sizes it has nothing to do either."""
        self._step += 1

    def freed(self, tensors: Sequence[Tensor]) -> None:
        """Nothing after the step that came last reads these buffers."""
        for tensor in tensors:
            self._blocks[self._slots.pop(id(tensor)) - len(self._inputs)].last = self._step - 1

    def _note(self, handle: Any, start: Start, fixed: set[int]) -> None:
        arguments: list[Any] = []
        places: list[tuple[int, int]] = []
        boxes: list[tuple[int, int, int]] = []
        descriptors = 0
        for place, operand in enumerate(start.operands):
            described = isinstance(operand, DESCRIPTORS)
            base = operand.base if described else operand
            if operand is None:
                arguments.append(None)
            elif id(base) not in self._slots and id(base) not in fixed:
                self._possible = False
                return
            elif described:
                if id(base) in self._slots:
                    boxes.append((place, descriptors, self._slots[id(base)]))
                descriptors += 1
                arguments.append(_at(operand, base.data_ptr()))
            elif id(base) in self._slots:
                places.append((place, self._slots[id(base)]))
                arguments.append(0)
            else:
                arguments.append(base.data_ptr())
        arguments += [*start.numbers, *start.constants.values(), start.pdl]
        told = handle.metadata
        scratch = bool(getattr(told, "global_scratch_size", 0) or getattr(told, "profile_scratch_size", 0))
        self._starts.append(
            _Start(
                kernel=start.kernel.__name__,
                run=handle.run,
                function=handle.function,
                metadata=handle.packed_metadata,
                programs=start.programs,
                arguments=arguments,
                places=places,
                boxes=boxes,
                pdl=start.pdl,
                scratch=scratch,
            )
        )

    def finish(self, outputs: Sequence[Tensor]) -> Bound | None:
        """The run as a Bound, or None where it cannot be repeated. `outputs` are among the allocated buffers."""
        given = [self._slots.get(id(output), -1) - len(self._inputs) for output in outputs]
        if not self._possible or not self._starts or len(set(given)) < len(given) or min(given, default=0) < 0:
            return None
        inner = [block for block in range(len(self._blocks)) if block not in given]
        offsets, size = _pack([self._blocks[block] for block in inner])
        known = len(self._inputs)
        order = {block: slot for slot, block in enumerate([*given, *inner], start=known)}

        def placed(slot: int) -> int:
            if slot < 0:
                return known + len(order) - slot - 1
            return slot if slot < known else order[slot - known]

        for start in self._starts:
            start.places = [(place, placed(slot)) for place, slot in start.places]
            start.boxes = [(place, number, placed(slot)) for place, number, slot in start.boxes]
        rows = [(placed(slot), offset) for slot, offset in self._rows]
        shapes = [(tuple(t.shape), t.stride(), t.dtype) for t in outputs]
        return Bound(self._starts, self._inputs, shapes, offsets, size, rows, self._trace.constants)


def _pack(blocks: Sequence[_Block]) -> tuple[list[int], int]:
    """Offsets of the blocks in one piece of memory, and its size: the largest first, each where it first fits.

    Two blocks whose steps overlap never share a byte.
    """
    offsets = [0] * len(blocks)
    placed: list[int] = []
    for index in sorted(range(len(blocks)), key=lambda i: -blocks[i].size):
        one, at = blocks[index], 0
        others = [i for i in placed if blocks[i].first <= one.last and one.first <= blocks[i].last]
        for other in sorted(others, key=lambda i: offsets[i]):
            if at + one.size <= offsets[other]:
                break
            at = max(at, -(-(offsets[other] + blocks[other].size) // ALIGNMENT) * ALIGNMENT)
        offsets[index] = at
        placed.append(index)
    return offsets, max((offsets[i] + blocks[i].size for i in placed), default=0)
