"""The program of a chain: which kernels run in which order on which buffers, as a value with a canonical text.

The text is an argument of the operator `moepdl::chain`, so compiled code that is loaded from a cache carries all it
needs: nothing refers to a registry of the process that compiled it.

    Program   inputs, symbols bound to input dimensions, outputs, and one Variant a range of T
    Variant   buffers and launches; the first variant with T <= max_tokens is taken (None: any T), T = symbols["T"]
    Buffer    shape and dtype, or `like` an input (a list of tensors when that input is a list)
    Launch    a kernel of the registry, its operands by name, its attributes, tiles for ranges of T
    Chunks    where a variant has it, its launches are made for some of the tokens at a time, see `chunks`

A program is checked when it is turned into text and when it is parsed; every fault is a ProgramError that names the
program, the variant, the launch and what is known instead.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch

from moe_compiler.runtime_kernels.chain.chunks import CHUNK_UNIT, cut_inputs, why_whole
from moe_compiler.runtime_kernels.chain.shapes import ShapeExpressionError, canonical
from moe_compiler.runtime_kernels.registry import UnknownKernelError, kernel, tiled
from moe_compiler.runtime_kernels.tiles import TileError, check_tile, parse_tile

Attribute = bool | int | float | str | tuple["Attribute", ...]


class ProgramError(ValueError):
    """A chain program that cannot be run as written."""


@dataclass(frozen=True)
class Buffer:
    """What a launch writes: `shape` (expressions in the symbols) and `dtype` ("bfloat16"), or `like` an input.

    `like` means torch.empty_like of that input, tensor by tensor when the input is a list: same shape, dtype and,
    where dense, strides.
    """

    shape: tuple[str, ...] | None = None
    dtype: str | None = None
    like: str | None = None


@dataclass(frozen=True)
class Launch:
    """One kernel launch. `ins` and `outs` map the kernel's parameters to inputs and buffers (None: absent operand).

    `attrs` are the kernel's attributes; a data type is written as its name ("float32") under a key that ends in
    "dtype". `pdl`: launch with the programmatic dependent launch attribute. `tiles`: (largest T, tile as `tiles` writes
    it) by growing T, the last for any T (None); a tile of None, and no tiles at all, leave the choice to the kernel.
    """

    kernel: str
    ins: Mapping[str, str | None]
    outs: Mapping[str, str]
    attrs: Mapping[str, Attribute] = field(default_factory=dict)
    pdl: bool = False
    tiles: tuple[tuple[int | None, str | None], ...] = ()


@dataclass(frozen=True)
class Chunks:
    """The launches of a variant are made once for each chunk of at most `tokens` tokens.

    `inputs` are those that have a row a token: a chunk reads its rows of them, and writes its rows of the outputs.
    """

    tokens: int
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class Variant:
    """Buffers and launches, in order, for T <= max_tokens (None: for any T). `chunks` None: for all tokens at once."""

    name: str
    max_tokens: int | None
    buffers: Mapping[str, Buffer]
    launches: tuple[Launch, ...]
    chunks: Chunks | None = None


@dataclass(frozen=True)
class Program:
    """A whole chain. `inputs`: (name, None) for a tensor, (name, n) for a list of n tensors, flattened in order."""

    name: str
    inputs: tuple[tuple[str, int | None], ...]
    symbols: Mapping[str, tuple[str, int]]
    outputs: tuple[str, ...]
    variants: tuple[Variant, ...]

    def variant_for(self, tokens: int) -> Variant:
        """The variant that runs with T tokens."""
        return next(v for v in self.variants if v.max_tokens is None or tokens <= v.max_tokens)

    def to_text(self) -> str:
        """Canonical JSON: equal programs have equal texts. Raises ProgramError when the program is faulty."""
        check(self)
        return json.dumps(_plain(self), sort_keys=True, separators=(",", ":"))

    @staticmethod
    def from_text(text: str) -> Program:
        """The checked program of a text, cached by the text. Raises ProgramError."""
        return _from_text(text)


@lru_cache(maxsize=1024)
def _from_text(text: str) -> Program:
    try:
        data = json.loads(text)
        program = Program(
            name=data["name"],
            inputs=tuple((name, count) for name, count in data["inputs"]),
            symbols={name: (tensor, dim) for name, (tensor, dim) in data["symbols"].items()},
            outputs=tuple(data["outputs"]),
            variants=tuple(
                Variant(
                    name=v["name"],
                    max_tokens=v["max_tokens"],
                    buffers={name: _buffer(b) for name, b in v["buffers"].items()},
                    launches=tuple(
                        Launch(
                            kernel=launch["kernel"],
                            ins=launch["ins"],
                            outs=launch["outs"],
                            attrs={key: _tupled(value) for key, value in launch["attrs"].items()},
                            pdl=launch["pdl"],
                            tiles=tuple((limit, tile) for limit, tile in launch.get("tiles", ())),
                        )
                        for launch in v["launches"]
                    ),
                    chunks=_chunks(v.get("chunks")),
                )
                for v in data["variants"]
            ),
        )
    except json.JSONDecodeError as error:
        raise ProgramError(f"the text of a chain program is not JSON: {error}") from None
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ProgramError(f"the text of a chain program lacks a field or has one of a wrong form: {error!r}") from None
    check(program)
    return program


def _buffer(data: Mapping[str, Any]) -> Buffer:
    shape = data.get("shape")
    return Buffer(tuple(shape) if shape is not None else None, data.get("dtype"), data.get("like"))


def _chunks(data: Mapping[str, Any] | None) -> Chunks | None:
    return None if data is None else Chunks(data["tokens"], tuple(data["inputs"]))


def _tupled(value: Any) -> Any:
    return tuple(_tupled(v) for v in value) if isinstance(value, list) else value


def _plain(program: Program) -> dict[str, Any]:
    def buffer(b: Buffer) -> dict[str, Any]:
        return {"like": b.like} if b.like is not None else {"shape": list(b.shape or ()), "dtype": b.dtype}

    def launch(item: Launch) -> dict[str, Any]:
        return {
            "kernel": item.kernel,
            "ins": dict(item.ins),
            "outs": dict(item.outs),
            "attrs": dict(item.attrs),
            "pdl": item.pdl,
            **({"tiles": [list(pair) for pair in item.tiles]} if item.tiles else {}),
        }

    def variant(v: Variant) -> dict[str, Any]:
        chunks = v.chunks
        return {
            "name": v.name,
            "max_tokens": v.max_tokens,
            "buffers": {name: buffer(b) for name, b in v.buffers.items()},
            "launches": [launch(item) for item in v.launches],
            **({} if chunks is None else {"chunks": {"tokens": chunks.tokens, "inputs": list(chunks.inputs)}}),
        }

    return {
        "name": program.name,
        "inputs": [list(pair) for pair in program.inputs],
        "symbols": {name: list(where) for name, where in program.symbols.items()},
        "outputs": list(program.outputs),
        "variants": [variant(v) for v in program.variants],
    }


def dtype_named(name: object) -> torch.dtype:
    """The torch.dtype called `name` ("bfloat16"). Raises ProgramError."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ProgramError(f"{name!r} is not the name of a torch dtype")
    return dtype


def check(program: Program) -> None:
    """Raise ProgramError on the first fault of `program`."""
    where = f"chain program {program.name!r}"
    inputs = dict(program.inputs)
    if len(inputs) != len(program.inputs):
        raise ProgramError(f"{where}: two inputs have the same name")
    for symbol, (name, _dim) in program.symbols.items():
        if name not in inputs:
            raise ProgramError(f"{where}: symbol {symbol!r} refers to {name!r}, which is no input")
        if inputs[name] is not None:
            raise ProgramError(f"{where}: symbol {symbol!r} refers to the list {name!r}; use an input that is a tensor")
    if not program.variants:
        raise ProgramError(f"{where}: it has no variant")
    if len(set(program.outputs)) != len(program.outputs):
        raise ProgramError(f"{where}: an output is named twice")
    limits = [v.max_tokens for v in program.variants]
    if limits[-1] is not None:
        raise ProgramError(f"{where}: the last variant, {program.variants[-1].name!r}, must accept any T (None)")
    bounds = [-1 if limit is None else limit for limit in limits[:-1]]
    if any(a >= b for a, b in pairwise([-1, *bounds])):
        raise ProgramError(f"{where}: max_tokens of the variants must grow, and only the last may be None: {limits}")
    if bounds and "T" not in program.symbols:
        raise ProgramError(f"{where}: it has several variants and no symbol 'T' to choose by")
    for variant in program.variants:
        _check_variant(program, variant, inputs, f"{where}, variant {variant.name!r}")
    _check_outputs_agree(program, where)


def _check_variant(program: Program, variant: Variant, inputs: Mapping[str, int | None], where: str) -> None:
    symbols = tuple(sorted(program.symbols))
    for name, buffer in variant.buffers.items():
        if name in inputs:
            raise ProgramError(f"{where}: buffer {name!r} has the name of an input; outputs and inputs never alias")
        if buffer.like is not None:
            if buffer.shape is not None or buffer.dtype is not None:
                raise ProgramError(f"{where}: buffer {name!r} has both `like` and a shape or dtype")
            if buffer.like not in inputs:
                raise ProgramError(f"{where}: buffer {name!r} is like {buffer.like!r}, which is no input")
            continue
        if buffer.shape is None or buffer.dtype is None:
            raise ProgramError(f"{where}: buffer {name!r} needs a shape and a dtype, or `like`")
        try:
            dtype_named(buffer.dtype)
            for expression in buffer.shape:
                canonical(expression, symbols)
        except (ShapeExpressionError, ProgramError) as error:
            raise ProgramError(f"{where}: buffer {name!r}: {error}") from None
    written: set[str] = set()
    for index, launch in enumerate(variant.launches):
        _check_launch(launch, variant, inputs, written, f"{where}, launch {index} ({launch.kernel})")
        written.update(launch.outs.values())
    for name in program.outputs:
        if name in inputs:
            raise ProgramError(f"{where}: output {name!r} is an input; an operator may not return its argument")
        if name not in variant.buffers:
            known = ", ".join(sorted(variant.buffers)) or "none"
            raise ProgramError(f"{where}: output {name!r} is missing; its buffers: {known}")
        if name not in written:
            raise ProgramError(f"{where}: output {name!r} is never written")
    if variant.chunks is not None:
        _check_chunks(program, variant, variant.chunks, where)


def _check_chunks(program: Program, variant: Variant, chunks: Chunks, where: str) -> None:
    if type(chunks.tokens) is not int or chunks.tokens < 1 or chunks.tokens % CHUNK_UNIT:
        raise ProgramError(
            f"{where}: chunks of {chunks.tokens!r} tokens; it must be a positive multiple of {CHUNK_UNIT}"
        )
    fault = why_whole(variant, program.outputs)
    if fault:
        raise ProgramError(f"{where}: it runs in chunks of the tokens, but {fault}")
    cut = cut_inputs(variant)
    if sorted(chunks.inputs) != sorted(cut):
        raise ProgramError(
            f"{where}: its chunks cut the inputs {', '.join(chunks.inputs) or 'none'}; "
            f"those that its launches read by token are {', '.join(cut)}"
        )
    if program.symbols.get("T") not in [(name, 0) for name in cut]:
        raise ProgramError(f"{where}: it runs in chunks, and symbol 'T' is not the rows of an input that they cut")


def _check_launch(
    launch: Launch, variant: Variant, inputs: Mapping[str, int | None], written: set[str], where: str
) -> None:
    try:
        traits = kernel(launch.kernel).traits
    except UnknownKernelError as error:
        raise ProgramError(f"{where}: {error}") from None
    _check_names(launch.ins, traits.reads, traits.optional_reads, f"{where}: operand")
    _check_names(launch.outs, traits.writes, traits.optional_writes, f"{where}: result")
    for parameter, name in launch.ins.items():
        if name is None:
            if parameter not in traits.optional_reads:
                raise ProgramError(f"{where}: operand {parameter!r} may not be absent")
            continue
        if name in inputs:
            is_list = inputs[name] is not None
        elif name in variant.buffers:
            if name not in written:
                raise ProgramError(f"{where}: operand {parameter!r} reads buffer {name!r} before it is written")
            is_list = _is_list(variant.buffers[name], inputs)
        else:
            known = ", ".join([*inputs, *sorted(variant.buffers)])
            raise ProgramError(f"{where}: operand {parameter!r} is {name!r}, no input or buffer; known: {known}")
        _check_list(parameter, name, is_list, parameter in traits.lists, where)
    if len(set(launch.outs.values())) != len(launch.outs):
        raise ProgramError(f"{where}: two results share a buffer")
    for parameter, name in launch.outs.items():
        if name in inputs:
            raise ProgramError(f"{where}: result {parameter!r} writes input {name!r}; a chain never writes its inputs")
        if name not in variant.buffers:
            known = ", ".join(sorted(variant.buffers)) or "none"
            raise ProgramError(f"{where}: result {parameter!r} writes {name!r}, which is no buffer; buffers: {known}")
        if name in written:
            raise ProgramError(f"{where}: buffer {name!r} is written a second time")
        _check_list(parameter, name, _is_list(variant.buffers[name], inputs), parameter in traits.lists, where)
    for key, value in launch.attrs.items():
        if key.endswith("dtype"):
            try:
                dtype_named(value)
            except ProgramError as error:
                raise ProgramError(f"{where}: attribute {key!r}: {error}") from None
    _check_tiles(launch, where)


def _check_tiles(launch: Launch, where: str) -> None:
    limits = [limit for limit, _ in launch.tiles]
    bounds = [limit for limit in limits[:-1] if type(limit) is int]
    whole = len(bounds) == len(limits[:-1]) and limits[-1:] in ([], [None])
    if not whole or any(a >= b for a, b in pairwise([0, *bounds])):
        raise ProgramError(f"{where}: the limits of its tiles must grow from 1, and only the last is None: {limits}")
    for _, text in launch.tiles:
        if text is None:
            continue
        try:
            check_tile(launch.kernel, parse_tile(text), tiled())
        except TileError as error:
            raise ProgramError(f"{where}: {error}") from None


def _check_names(given: Mapping[str, Any], names: tuple[str, ...], optional: tuple[str, ...], where: str) -> None:
    for name in given:
        if name not in names:
            raise ProgramError(f"{where} {name!r} is not known; the kernel has {', '.join(names)}")
    for name in names:
        if name not in given and name not in optional:
            raise ProgramError(f"{where} {name!r} is missing; the kernel has {', '.join(names)}")


def _check_list(parameter: str, name: str, given: bool, wanted: bool, where: str) -> None:
    if given != wanted:
        kinds = {True: "a list of tensors", False: "one tensor"}
        raise ProgramError(f"{where}: {parameter!r} is {kinds[wanted]}, but {name!r} is {kinds[given]}")


def _is_list(buffer: Buffer, inputs: Mapping[str, int | None]) -> bool:
    return buffer.like is not None and inputs[buffer.like] is not None


def _check_outputs_agree(program: Program, where: str) -> None:
    symbols = tuple(sorted(program.symbols))

    def meaning(buffer: Buffer) -> object:
        if buffer.shape is None:
            return buffer.like
        return tuple(canonical(text, symbols) for text in buffer.shape), buffer.dtype

    first = program.variants[0]
    for variant in program.variants[1:]:
        for name in program.outputs:
            if meaning(variant.buffers[name]) != meaning(first.buffers[name]):
                raise ProgramError(
                    f"{where}: output {name!r} is {first.buffers[name]} in variant {first.name!r} "
                    f"and {variant.buffers[name]} in variant {variant.name!r}; they must agree"
                )
