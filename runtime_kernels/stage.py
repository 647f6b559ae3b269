"""Definition of operators that are one kernel of the registry each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_compiler.runtime_kernels.library import define
from moe_compiler.runtime_kernels.registry import kernel

Result = Tensor | list[Tensor]


def is_empty(result: Result) -> bool:
    """Whether a result holds no element: there is nothing to launch for it."""
    return result.numel() == 0 if isinstance(result, Tensor) else all(t.numel() == 0 for t in result)


def launch(name: str, outs: Sequence[Result], ins: dict[str, Any], attrs: dict[str, Any]) -> None:
    """Launch a kernel on freshly allocated `outs`, one a name of its writes, without PDL.

    An optional result that is empty is not wanted and left out; a launch whose results are all empty is skipped.
    """
    entry = kernel(name)
    optional = entry.traits.optional_writes
    named = {n: out for n, out in zip(entry.traits.writes, outs, strict=True) if n not in optional or not is_empty(out)}
    if any(not is_empty(out) for out in named.values()):
        entry.launch(named, ins, attrs, pdl=False)


def define_stage(
    schema: str, allocate: Callable[..., Any], autograd: Callable[..., Any] | None = None
) -> torch._ops.OpOverload:
    """Define the operator of `schema`, whose name is a kernel's and whose arguments are its reads and attributes.

    `allocate(*arguments)` returns uninitialised results, one a name of the kernel's writes (a tuple, or one tensor
    alone): it is the fake implementation, and the allocation on CUDA. List results are concatenated by the operator.
    """
    name = schema.partition("(")[0]
    entry = kernel(name)
    flatten = all(write in entry.traits.lists for write in entry.traits.writes)

    def packed(results: Any) -> Any:
        if not flatten:
            return results
        return [t for part in results for t in part] if isinstance(results, tuple) else results

    def fake(*args: Any) -> Any:
        return packed(allocate(*args))

    def cpu(*args: Any) -> Any:
        return packed(entry.reference(*args))

    def cuda(*args: Any) -> Any:
        named = dict(zip(parameters, args, strict=True))
        results = allocate(*args)
        reads = entry.traits.reads
        launch(
            name,
            results if isinstance(results, tuple) else (results,),
            {key: named[key] for key in reads},
            {key: value for key, value in named.items() if key not in reads},
        )
        return packed(results)

    op = define(schema, fake=fake, cpu=cpu, cuda=cuda, autograd=autograd)
    parameters = [argument.name for argument in op._schema.arguments]
    return op
