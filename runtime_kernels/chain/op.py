"""The operator moepdl::chain(Tensor[] tensors, str program) -> Tensor[]: a whole planned chain as one call.

The program travels as text in the operator's argument, see `program`. Outputs are fresh tensors, never inputs or
aliases of them. On the CPU the references of the kernels run; on CUDA the kernels are launched, see `launcher`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_compiler.runtime_kernels.chain.launcher import run as _cuda
from moe_compiler.runtime_kernels.chain.prepared import PreparedBuffer, PreparedLaunch, Value, flatten, prepare
from moe_compiler.runtime_kernels.chain.program import ProgramError
from moe_compiler.runtime_kernels.library import define


def fake(tensors: list[Tensor], program: str) -> list[Tensor]:
    """The chain's results as fresh tensors of their shapes."""
    return flatten(list(prepare(program).outputs_for(tensors).values()))


def cpu(tensors: list[Tensor], program: str) -> list[Tensor]:
    """The chain's results, by the references of its kernels."""
    prepared = prepare(program)
    values, sizes = prepared.bind(tensors)
    variant = prepared.variant(sizes)
    whole, chunks = prepared.chunks(variant, values, sizes, tensors[0].device)
    for chunk in chunks:
        values = chunk.values
        rows = {name: values.pop(name) for name in whole}
        for launch in variant.launches:
            ins = {parameter: None if name is None else values[name] for parameter, name in launch.ins}
            results = launch.kernel.reference(**ins, **launch.attrs)
            results = results if isinstance(results, tuple) else (results,)
            named = dict(zip(launch.kernel.traits.writes, results, strict=True))
            for parameter, buffer in launch.outs:
                value = named[parameter]
                _check_result(prepared.name, launch, parameter, buffer, value, chunk.sizes)
                values[buffer.name] = value
            for name in launch.dead:
                del values[name]
        for name, row in rows.items():
            row.copy_(values[name])  # type: ignore[union-attr, arg-type]
    return flatten([whole.get(name, values[name]) for name in prepared.outputs])


def _check_result(
    program: str, launch: PreparedLaunch, parameter: str, buffer: PreparedBuffer, value: Value, sizes: list[Any]
) -> None:
    """A buffer that is declared with a wrong shape would be memory written out of bounds on a device."""
    if buffer.shape is None or not isinstance(value, Tensor):
        return
    shape = buffer.shape(sizes)
    if tuple(value.shape) != shape or value.dtype != buffer.dtype:
        raise ProgramError(
            f"chain program {program!r}: {launch.kernel.name} gives {parameter!r} as {tuple(value.shape)} "
            f"{value.dtype}, but buffer {buffer.name!r} is declared {shape} {buffer.dtype}"
        )


define("chain(Tensor[] tensors, str program) -> Tensor[]", fake=fake, cpu=cpu, cuda=_cuda)
