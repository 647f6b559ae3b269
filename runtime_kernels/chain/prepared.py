"""A chain program made ready to run: names resolved to slots, shapes compiled, the last use of each buffer known.

Prepared once a text and shared by the fake, the CPU and the CUDA implementation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from moe_compiler.runtime_kernels.chain.chunks import rounds
from moe_compiler.runtime_kernels.chain.memory import lifetimes
from moe_compiler.runtime_kernels.chain.program import (
    Buffer,
    Chunks,
    Launch,
    Program,
    ProgramError,
    Variant,
    dtype_named,
)
from moe_compiler.runtime_kernels.chain.shapes import compile_shape
from moe_compiler.runtime_kernels.registry import Kernel, kernel
from moe_compiler.runtime_kernels.tiles import Tile, parse_tile

# A server sees as many numbers of tokens as its batches have; an entry takes some kilobytes.
_BOUND_LIMIT = 1024

Value = Tensor | list[Tensor]


@dataclass(frozen=True)
class PreparedBuffer:
    """How to allocate a buffer: a shape function and a dtype, or the input that it is like."""

    name: str
    shape: Callable[[Sequence[Any]], tuple[Any, ...]] | None
    dtype: torch.dtype | None
    like: str | None

    def allocate(self, sizes: Sequence[Any], values: dict[str, Value], device: torch.device) -> Value:
        """An uninitialised buffer; `sizes` are the symbols' values."""
        if self.shape is not None:
            return torch.empty(self.shape(sizes), dtype=self.dtype, device=device)
        source = values[self.like or ""]
        return torch.empty_like(source) if isinstance(source, Tensor) else [torch.empty_like(t) for t in source]


@dataclass(frozen=True)
class PreparedLaunch:
    """A launch with its kernel, its attributes as Python values and the buffers that nothing reads after it."""

    kernel: Kernel
    ins: tuple[tuple[str, str | None], ...]
    outs: tuple[tuple[str, PreparedBuffer], ...]
    attrs: dict[str, Any]
    pdl: bool
    dead: tuple[str, ...]
    tiles: tuple[tuple[int | None, Tile | None], ...] = ()

    def options(self, tokens: int | None) -> dict[str, Any]:
        """What the launch takes besides: the tile for T tokens, where the program names one."""
        for limit, tile in self.tiles:
            if limit is None or (tokens is not None and tokens <= limit):
                return {} if tile is None else {"tile": tile}
        return {}


@dataclass(frozen=True)
class PreparedVariant:
    """The launches of one range of T, the buffers that are the outputs, and how the tokens are cut."""

    name: str
    launches: tuple[PreparedLaunch, ...]
    outputs: tuple[PreparedBuffer, ...]
    chunks: Chunks | None


@dataclass(frozen=True)
class Chunk:
    """What one round of launches works on: the values that are there before it, and the symbols' values.

    rows: the tensors among the values that are a part of a whole one, each with that whole
    """

    values: dict[str, Value]
    sizes: list[Any]
    rows: tuple[tuple[Tensor, Tensor], ...] = ()


class PreparedProgram:
    """A checked program with its variants, ready to bind to tensors."""

    def __init__(self, program: Program) -> None:
        self.name = program.name
        self.outputs = program.outputs
        self._slots: list[tuple[str, int, int | None]] = []
        position = 0
        for name, count in program.inputs:
            self._slots.append((name, position, count))
            position += 1 if count is None else count
        self._count = position
        self.are_weights = [
            count is not None for _, _, count in self._slots for _ in range(1 if count is None else count)
        ]
        self._weight = self.are_weights.index(True) if True in self.are_weights else None
        # Runs that the launcher can repeat, by signature, and None for those that it cannot.
        self.bound: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        starts = {name: start for name, start, _ in self._slots}
        symbols = tuple(sorted(program.symbols))
        self._symbols = [(starts[program.symbols[s][0]], program.symbols[s][1]) for s in symbols]
        self._tokens = symbols.index("T") if "T" in symbols else None
        self._limits = [(v.max_tokens, _variant(v, program, symbols)) for v in program.variants]

    def bind(self, tensors: Sequence[Tensor]) -> tuple[dict[str, Value], list[Any]]:
        """Inputs by name, and the symbols' values. Raises ProgramError when the number of tensors is wrong."""
        if len(tensors) != self._count:
            raise ProgramError(f"chain program {self.name!r} takes {self._count} tensors, got {len(tensors)}")
        values: dict[str, Value] = {
            name: tensors[start] if count is None else list(tensors[start : start + count])
            for name, start, count in self._slots
        }
        return values, [tensors[index].shape[dim] for index, dim in self._symbols]

    def outputs_for(self, tensors: Sequence[Tensor]) -> dict[str, Value]:
        """Uninitialised memory for the outputs of a run on these operands, by name, in the outputs' order."""
        values, sizes = self.bind(tensors)
        buffers = self.any_variant().outputs
        return {buffer.name: buffer.allocate(sizes, values, tensors[0].device) for buffer in buffers}

    def signature(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """All that the launches of a run depend on: sizes, strides, dtypes, alignment, and where the weights are.

        The tensors of a list share shape and strides, which is checked when their addresses are new.
        """
        found: list[Any] = [tensors[0].device]
        for _, start, count in self._slots:
            if count == 0:
                continue
            tensor = tensors[start]
            if count is None:
                place: Any = tensor.data_ptr() % 16
            else:
                place = tensor.data_ptr() if count == 1 else tuple(map(Tensor.data_ptr, tensors[start : start + count]))
            found += (place, tensor.shape, tensor.stride(), tensor.dtype)
        return tuple(found)

    def weights_dtype(self, tensors: Sequence[Tensor]) -> torch.dtype | None:
        """The dtype that the chain's matmuls compute in, None for a chain without any."""
        return None if self._weight is None else tensors[self._weight].dtype

    def keep(self, signature: tuple[Any, ...], bound: Any) -> None:
        """Remember how to repeat a run, at the cost of the one that was remembered first when there are too many."""
        self.bound[signature] = bound
        if len(self.bound) > _BOUND_LIMIT:
            self.bound.popitem(last=False)

    def tokens_of(self, tensors: Sequence[Tensor]) -> int | None:
        """T of these operands, or None for a program that has no symbol T."""
        if self._tokens is None:
            return None
        index, dim = self._symbols[self._tokens]
        return tensors[index].shape[dim]

    def tokens(self, sizes: Sequence[Any]) -> int | None:
        """T, or None for a program that has no symbol T."""
        return None if self._tokens is None else sizes[self._tokens]

    def variant(self, sizes: Sequence[int]) -> PreparedVariant:
        """The variant for the symbols' values."""
        return self._limits[-1][1] if self._tokens is None else self.variant_of(sizes[self._tokens])

    def variant_of(self, tokens: int) -> PreparedVariant:
        """The variant for T tokens."""
        return next(variant for limit, variant in self._limits if limit is None or tokens <= limit)

    def chunks(
        self,
        variant: PreparedVariant,
        values: dict[str, Value],
        sizes: list[Any],
        device: torch.device,
        given: Mapping[str, Value] | None = None,
    ) -> tuple[dict[str, Value], Iterator[Chunk]]:
        """The outputs that are there before the launches, by name, and the rounds of launches in order.

        given: memory for the outputs. Without it those are there that more than one round writes; one round allocates
        them itself.
        """
        cut, at = variant.chunks, self._tokens
        parts = [] if cut is None or at is None else rounds(sizes[at], cut.tokens)
        whole: dict[str, Value] = dict(given or {})
        if cut is None or at is None or len(parts) == 1:
            return whole, iter([Chunk({**values, **whole}, sizes)])
        for buffer in variant.outputs if given is None else ():
            whole[buffer.name] = buffer.allocate(sizes, values, device)
        tensors = {name: value for name in cut.inputs if isinstance(value := values[name], Tensor)}
        for name, value in whole.items():
            assert isinstance(value, Tensor), "outputs of a variant in chunks have a row a token"
            tensors[name] = value

        def each() -> Iterator[Chunk]:
            for first, count in parts:
                rows = {name: tensor.narrow(0, first, count) for name, tensor in tensors.items()}
                pairs = tuple((rows[name], tensor) for name, tensor in tensors.items())
                yield Chunk({**values, **rows}, [count if i == at else size for i, size in enumerate(sizes)], pairs)

        return whole, each()

    def any_variant(self) -> PreparedVariant:
        """Some variant: all agree on the outputs, so a fake implementation needs no choice, hence no guard on T."""
        return self._limits[-1][1]


def _variant(variant: Variant, program: Program, symbols: tuple[str, ...]) -> PreparedVariant:
    buffers = {name: _buffer(name, buffer, symbols) for name, buffer in variant.buffers.items()}
    last = {name: end for name, (_, end) in lifetimes(variant, program.outputs).items()}
    launches = []
    for index, launch in enumerate(variant.launches):
        dead = tuple(sorted(name for name, end in last.items() if end == index))
        launches.append(_launch(launch, buffers, dead))
    outputs = tuple(buffers[name] for name in program.outputs)
    return PreparedVariant(variant.name, tuple(launches), outputs, variant.chunks)


def _buffer(name: str, buffer: Buffer, symbols: tuple[str, ...]) -> PreparedBuffer:
    if buffer.shape is None:
        return PreparedBuffer(name, None, None, buffer.like)
    return PreparedBuffer(name, compile_shape(buffer.shape, symbols), dtype_named(buffer.dtype), None)


def _launch(launch: Launch, buffers: dict[str, PreparedBuffer], dead: tuple[str, ...]) -> PreparedLaunch:
    entry = kernel(launch.kernel)
    attrs = {key: dtype_named(value) if key.endswith("dtype") else value for key, value in launch.attrs.items()}
    ins = tuple((name, launch.ins.get(name)) for name in entry.traits.reads)
    outs = tuple((name, buffers[launch.outs[name]]) for name in entry.traits.writes if name in launch.outs)
    tiles = tuple((limit, None if text is None else parse_tile(text)) for limit, text in launch.tiles)
    return PreparedLaunch(entry, ins, outs, attrs, launch.pdl, dead, tiles)


@lru_cache(maxsize=1024)
def prepare(text: str) -> PreparedProgram:
    """The prepared program of a text, cached. Raises ProgramError for a faulty program."""
    return PreparedProgram(Program.from_text(text))


def flatten(values: Sequence[Value]) -> list[Tensor]:
    """Outputs in order, lists expanded."""
    flat: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            flat.append(value)
        else:
            flat.extend(value)
    return flat
