"""A chain on CUDA: allocate, launch in order, free each intermediate buffer after its last use.

Memory freed inside the chain may be given to a later launch of it. That is safe with PDL too: every kernel waits
before it writes, and a wait that returns means that all earlier grids of the chain are complete. So it is where a
variant runs in chunks of the tokens: a chunk's memory is the next one's.

The first run with given sizes and weights goes this way and is watched; later ones repeat its launches, see `bound`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_compiler.runtime_kernels.chain.prepared import (
    Chunk,
    PreparedProgram,
    PreparedVariant,
    Value,
    flatten,
    prepare,
)
from moe_compiler.runtime_kernels.stage import is_empty

if TYPE_CHECKING:
    from moe_compiler.runtime_kernels.chain.bound import Binder

_NEW = object()


class KernelLaunchError(RuntimeError):
    """A kernel of a chain could not be compiled or launched; `kernel` is its name, the cause is chained."""

    def __init__(self, chain: str, variant: str, kernel: str, cause: BaseException) -> None:
        super().__init__(
            f"chain {chain!r}, variant {variant!r}: kernel {kernel} failed: {type(cause).__name__}: {cause}"
        )
        self.kernel = kernel
        self.cause = cause


@lru_cache
def _triton_side() -> tuple[ModuleType, ModuleType]:
    """The modules `bound` and `launching`. Without a GPU nothing needs triton, which they import."""
    from moe_compiler.runtime_kernels import launching
    from moe_compiler.runtime_kernels.chain import bound

    return bound, launching


def run(tensors: Sequence[Tensor], text: str, outputs: Mapping[str, Value] | None = None) -> list[Tensor]:
    """Run the program on the current stream of the tensors' device; everything is allocated on that stream.

    outputs: memory for the results, from `PreparedProgram.outputs_for`, where they must come from another stream.
    Raises ProgramError for a faulty program, KernelLaunchError.
    """
    first = tensors[0]
    if first.is_cuda and torch.cuda.current_device() != first.get_device():
        with torch.cuda.device(first.device):
            return run(tensors, text, outputs)
    bound, launching = _triton_side()
    program = prepare(text)
    key = program.signature(tensors)
    if program.weights_dtype(tensors) is torch.float32:
        key = (*key, launching.precision(torch.float32))
    known = program.bound.get(key, _NEW)
    if known is None:
        return _run(program, tensors, None, outputs)
    if known is not _NEW:
        if bound.watched() or (known.tables and torch.cuda.is_current_stream_capturing()):
            return _run(program, tensors, None, outputs)
        try:
            return known(tensors, None if outputs is None else flatten(list(outputs.values())))  # type: ignore[no-any-return]
        except Exception as error:
            raise KernelLaunchError(program.name, "bound", known.launching, error) from error
    if launching.is_recording():
        # Nothing was computed, but what comes after the chain may index with its ids: zeros are valid ones.
        return [out if out.is_floating_point() else out.zero_() for out in _run(program, tensors, None, outputs)]
    if program.tokens_of(tensors) == 0:
        return _run(program, tensors, None, outputs)
    with launching.tracing() as trace:
        binder = bound.Binder(trace, tensors, program.are_weights)
        results = _run(program, tensors, binder, outputs)
    program.keep(key, binder.finish(results))
    return results


def _run(
    program: PreparedProgram, tensors: Sequence[Tensor], binder: Binder | None, outputs: Mapping[str, Value] | None
) -> list[Tensor]:
    values, sizes = program.bind(tensors)
    variant = program.variant(sizes)
    device = tensors[0].device
    whole, chunks = program.chunks(variant, values, sizes, device, outputs)
    if binder is not None:
        binder.allocated(flatten(list(whole.values())))
    for chunk in chunks:
        if binder is not None:
            binder.cut(chunk.rows)
        _launch(program, variant, chunk, device, binder)
        if binder is not None:
            binder.whole(chunk.rows)
        values = chunk.values
    return flatten([whole.get(name, values[name]) for name in program.outputs])


def _launch(
    program: PreparedProgram, variant: PreparedVariant, chunk: Chunk, device: torch.device, binder: Binder | None
) -> None:
    """Make the launches of a variant for one chunk; what they leave is in its values."""
    values = chunk.values
    # With no tokens some launches are skipped, so a launch's predecessor is not the planned one.
    tokens = program.tokens(chunk.sizes)
    pdl_allowed = tokens != 0
    for launch in variant.launches:
        outs: dict[str, Value] = {}
        work = False
        for parameter, buffer in launch.outs:
            out = values.get(buffer.name)
            if out is None:
                out = values[buffer.name] = buffer.allocate(chunk.sizes, values, device)
                if binder is not None:
                    binder.allocated(flatten([out]))
            outs[parameter] = out
            work = work or not is_empty(out)
        if work:
            ins = {parameter: None if name is None else values[name] for parameter, name in launch.ins}
            try:
                launch.kernel.launch(outs, ins, launch.attrs, pdl=launch.pdl and pdl_allowed, **launch.options(tokens))
            except Exception as error:
                raise KernelLaunchError(program.name, variant.name, launch.kernel.name, error) from error
        if binder is not None:
            binder.launched() if work else binder.skipped()
        for name in launch.dead:
            value = values.pop(name)
            if binder is not None:
                binder.freed(flatten([value]))
