"""The operators of a chain that runs beside other work, like an asynchronous collective:

    moepdl::chain_start(Tensor[] tensors, str program, int? limit, bool captured) -> Tensor
    moepdl::chain_wait(Tensor token, Tensor[] tensors, Tensor[] beside, str program) -> Tensor[]

`chain_start` launches the whole chain on a second stream (see `side_stream`) and returns a token; `chain_wait` joins
it and returns the results of `moepdl::chain(tensors, program)`. The choice between two streams and one is made at each
call from what the host knows, without a question to the device: with more than `limit` tokens (None: no limit), and,
where `captured`, outside of the capture of a CUDA graph, the chain is launched on the current stream and the wait does
nothing. On the CPU the start computes.

The results exist only from the wait on. Before it there is no name for them that anything could read, write or free;
so neither operator needs to return an alias or to write into an argument, and whatever orders a graph by its data
orders these two. The token is one byte, and no value: the chain under way is an attribute of the tensor, which torch
keeps with it from operator to operator. It stands first among the wait's arguments: Inductor moves what is read once in
front of its reader, in the order of the arguments, so the start stays in front of `beside`.

tensors    of the wait: those of the start. They are read until then, and whoever plans memory by who reads it last
           (Inductor does) must see that
beside     results that must be computed before the wait, so that nothing moves the wait ahead of what it is to overlap
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_compiler.runtime_kernels.chain.launcher import run
from moe_compiler.runtime_kernels.chain.op import cpu, fake
from moe_compiler.runtime_kernels.chain.prepared import prepare
from moe_compiler.runtime_kernels.chain.program import ProgramError
from moe_compiler.runtime_kernels.chain.side_stream import Flight, take_off
from moe_compiler.runtime_kernels.library import define

__all__ = ["flies"]

_FLIGHT = "_moepdl_flight"


def flies(tokens: int | None, limit: int | None, captured: bool) -> bool:
    """Whether a chain of T tokens takes a second stream now. The current device must be the chain's."""
    if tokens == 0 or (limit is not None and (tokens is None or tokens > limit)):
        return False
    return not captured or torch.cuda.is_current_stream_capturing()


def _token(tensors: list[Tensor]) -> Tensor:
    return torch.empty(1, dtype=torch.uint8, device=tensors[0].device)


def _carrying(tensors: list[Tensor], under_way: Flight | list[Tensor]) -> Tensor:
    """A token with a chain under way, or with the results of one that needs no join."""
    token = _token(tensors)
    setattr(token, _FLIGHT, under_way)
    return token


def _start_fake(tensors: list[Tensor], program: str, limit: int | None, captured: bool) -> Tensor:
    return _token(tensors)


def _start_cpu(tensors: list[Tensor], program: str, limit: int | None, captured: bool) -> Tensor:
    return _carrying(tensors, cpu(tensors, program))


def _start_cuda(tensors: list[Tensor], program: str, limit: int | None, captured: bool) -> Tensor:
    with torch.cuda.device(tensors[0].device):
        if flies(prepare(program).tokens_of(tensors), limit, captured):
            return _carrying(tensors, take_off(tensors, program))
        return _carrying(tensors, run(tensors, program))


def _wait_fake(token: Tensor, tensors: list[Tensor], beside: list[Tensor], program: str) -> list[Tensor]:
    return fake(tensors, program)


def _wait(token: Tensor, tensors: list[Tensor], beside: list[Tensor], program: str) -> list[Tensor]:
    under_way: Flight | list[Tensor] | None = token.__dict__.pop(_FLIGHT, None)
    if under_way is None:
        raise ProgramError(
            f"chain program {prepare(program).name!r}: chain_wait was given a token without a chain under way; "
            "it takes the very tensor that chain_start returned, once"
        )
    return under_way if isinstance(under_way, list) else under_way.land()


define(
    "chain_start(Tensor[] tensors, str program, int? limit, bool captured) -> Tensor",
    fake=_start_fake,
    cpu=_start_cpu,
    cuda=_start_cuda,
)
define(
    "chain_wait(Tensor token, Tensor[] tensors, Tensor[] beside, str program) -> Tensor[]",
    fake=_wait_fake,
    cpu=_wait,
    cuda=_wait,
)
