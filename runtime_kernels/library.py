"""The one library in which every moepdl operator is defined, and the helpers that define them.

Importing this module creates the namespace and defines no operator; `register` defines them all. Operators are made
through `torch.library.Library` and not through the decorators because a call then costs a few microseconds less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "moepdl"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")

# Operators read strides, so Inductor need not make their inputs contiguous.
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)


def define(
    schema: str,
    *,
    fake: Callable[..., Any],
    cpu: Callable[..., Any],
    cuda: Callable[..., Any],
    autograd: Callable[..., Any] | None = None,
) -> torch._ops.OpOverload:
    """Define the operator of `schema` ("name(Tensor x, ...) -> ...") with its implementations; return its overload.

    `fake` computes shapes only (also for meta tensors). `autograd`, where given, is the kernel of the Autograd key:
    it is called instead of the others and reaches them inside `below_autograd()`.
    """
    name = LIBRARY.define(schema, tags=TAGS)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    LIBRARY.impl(name, _without_autocast(cpu), "CPU")
    LIBRARY.impl(name, cuda, "CUDA")
    if autograd is not None:
        LIBRARY.impl(name, autograd, "Autograd")
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _without_autocast(cpu: Callable[..., Any]) -> Callable[..., Any]:
    """The compiler has already put the operands into the dtype that autocast asked for; nothing is cast again."""

    def run(*arguments: Any) -> Any:
        if not torch.is_autocast_enabled("cpu"):
            return cpu(*arguments)
        with torch.autocast("cpu", enabled=False):
            return cpu(*arguments)

    return run


def below_autograd() -> AbstractContextManager[Any]:
    """A context in which operators skip their Autograd kernels. Private in torch, as are two names in
    exchange/groups.py, and nothing else of this package.
    """
    return torch._C._AutoDispatchBelowAutograd()


class SecondDerivativeError(NotImplementedError):
    """A gradient of a gradient through a moepdl operator was asked for; there is none."""


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operator: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.operator = operator
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise SecondDerivativeError(
            f"{NAMESPACE}::{ctx.operator} has no second derivative; "
            "leave blocks that need one to torch (option `disable`), or drop create_graph=True"
        )


def differentiable_once(
    operator: str, grads: Sequence[Tensor | None], sources: Sequence[Tensor]
) -> list[Tensor | None]:
    """The results of a backward, which raise SecondDerivativeError when they are differentiated again.

    `sources` are the tensors that the gradients depend on. Without create_graph=True the results come back as they are.
    torch's `once_differentiable` looks at the incoming gradient only, so it would give zero without a word.
    """
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in sources)):
        return list(grads)
    given = [g for g in grads if g is not None]
    marked = iter(_Once.apply(operator, len(given), *given, *sources))
    return [None if g is None else next(marked) for g in grads]
