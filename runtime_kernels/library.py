"""The one library in which every moepdl operator is defined, and the helpers that define them.

Importing this module creates the namespace and defines no operator; `register` defines them all. Operators are made
through `torch.library.Library` and not through the decorators because a call then costs a few microseconds less.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

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
    LIBRARY.impl(name, cpu, "CPU")
    LIBRARY.impl(name, cuda, "CUDA")
    if autograd is not None:
        LIBRARY.impl(name, autograd, "Autograd")
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def below_autograd() -> AbstractContextManager[Any]:
    """A context in which operators skip their Autograd kernels. The only private torch API of this package."""
    return torch._C._AutoDispatchBelowAutograd()
