"""The accuracy rule: error against float64 at most 1.5 times eager's own, plus a little, relative to the norm.

The float64 run is the same module with eager's choice of experts: what a top-k picks is not rounding. Casts that the
module writes out (`.float()`, `softmax(dtype=)`) are passed over in it, or it would not be float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moe_compiler.backend import last_reports, moepdl
from moe_compiler.report import Report

DOUBT = 3.0
SLACK = {torch.float32: 1e-6, torch.bfloat16: 1e-3}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


_TOPK = (torch.topk, Tensor.topk)
_SORT, _ARGSORT = (torch.sort, Tensor.sort), (torch.argsort, Tensor.argsort)
_MAX, _ARGMAX = (torch.max, Tensor.max), (torch.argmax, Tensor.argmax)


def _selects(func: Any, args: Any) -> bool:
    """Does a call choose among scores: numbers that are no ids, along a dimension that is named or the last?"""
    if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
        return False
    return func in (*_TOPK, *_SORT, *_ARGSORT, *_MAX, *_ARGMAX)


class _Choices(TorchFunctionMode):
    """Notes what every choice among scores chose (top-k, sort, maximum), in order."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _selects(func, args):
            self.ids.append(result[1] if isinstance(result, tuple) else result)
        return result


class _Double(TorchFunctionMode):
    """Runs in float64 what asks for less, and lets every choice be what was noted."""

    def __init__(self, ids: Sequence[Tensor]) -> None:
        super().__init__()
        self.ids = list(ids)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        double = bool(args) and isinstance(args[0], Tensor) and args[0].dtype == torch.float64
        if kwargs.get("dtype") in _FLOATS:
            kwargs["dtype"] = torch.float64
        if double and (func is Tensor.float or (func is Tensor.to and args[1:2] and args[1] in _FLOATS)):
            return args[0]
        if _selects(func, args):
            ids = self.ids.pop(0)
            if func in (*_ARGSORT, *_ARGMAX):
                return ids
            if func in _TOPK and kwargs.get("dim", -1) not in (-1, args[0].dim() - 1):
                return torch.return_types.topk((args[0].gather(kwargs["dim"], ids), ids))  # tokens for each expert
            values = args[0].gather(-1, ids if ids.dim() == args[0].dim() else ids.unsqueeze(-1)).reshape(ids.shape)
            return torch.return_types.topk((values, ids))
        if func is torch._grouped_mm:
            return _grouped(args[0], args[1], kwargs["offs"])
        return func(*args, **kwargs)


def _grouped(rows: Tensor, weights: Tensor, offs: Tensor) -> Tensor:
    ends = offs.tolist()
    return torch.cat([rows[a:b] @ w for a, b, w in zip([0, *ends], ends, weights, strict=False)])


def _run(module: Callable[..., Any], leaves: list[Tensor], x: Tensor, tangents: list[Tensor] | None) -> list[Tensor]:
    """Outputs and gradients of the leaves, flat; a leaf without a gradient gives zeros."""
    out = module(x)
    outputs = [t for t in (out if isinstance(out, tuple) else (out,)) if t.dtype.is_floating_point]
    if tangents is None:
        return [t.detach() for t in outputs]
    grads = torch.autograd.grad(
        outputs, leaves, [t.to(o.dtype) for t, o in zip(tangents, outputs, strict=True)], allow_unused=True
    )
    return [t.detach() for t in outputs] + [
        torch.zeros_like(leaf) if g is None else g for g, leaf in zip(grads, leaves, strict=True)
    ]


def raised_agrees(
    module: torch.nn.Module,
    x: Tensor,
    *,
    compiled: Callable[..., Any] | None = None,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    slack: float | None = None,
    training: bool = True,
    repeats: int = 0,
) -> Report:
    """Compile `module` with the backend and hold outputs and gradients to the accuracy rule -> the report.

    training: off, there are no gradients, and nothing is recorded for them. repeats: where a result is up to DOUBT
    times beyond its bound, as few numbers may be by chance, that many more inputs are drawn and judged together.
    """
    if compiled is None:
        compiled = compile_eager(module)
    allowed = SLACK[x.dtype] if slack is None else slack
    drawn = [_errors(module, x, compiled, context, allowed, training)]
    if repeats and any(bound < error <= DOUBT * bound for error, bound, _ in drawn[0]):
        drawn += [_errors(module, torch.randn_like(x), compiled, context, allowed, training) for _ in range(repeats)]
    for index, results in enumerate(zip(*drawn, strict=True)):
        errors, bounds = ([result[place] for result in results] for place in (0, 1))
        error, bound = (sum(value**2 for value in values) ** 0.5 for values in (errors, bounds))
        limit = max(DOUBT * b for b in bounds) if repeats else bound
        assert error <= bound and max(errors) <= limit, f"result {index}: {results[0][2]} ({len(drawn)} draws)"
    return last_reports()[-1]


def _errors(
    module: torch.nn.Module,
    x: Tensor,
    compiled: Callable[..., Any],
    context: Callable[[], AbstractContextManager[Any]],
    allowed: float,
    training: bool,
) -> list[tuple[float, float, str]]:
    """(error, what is allowed, words) of each output and gradient."""
    x = x.detach().requires_grad_(training)
    leaves = [x, *module.parameters()]
    with context(), _Choices() as choices:
        shapes = [t.shape for t in _run(module, leaves, x, None)]
    tangents = [torch.randn(shape, dtype=torch.float64) for shape in shapes] if training else None
    with context(), torch.set_grad_enabled(training):
        eager = _run(module, leaves, x, tangents)
        ours = _run(compiled, leaves, x, tangents)
    double = copy.deepcopy(module).double()
    wide = x.detach().double().requires_grad_(training)
    with _Double(choices.ids):
        exact = _run(double, [wide, *double.parameters()], wide, tangents)
    found = []
    for reference, plain, mine in zip(exact, eager, ours, strict=True):
        assert mine.dtype == plain.dtype and mine.shape == plain.shape
        error, own = (mine.double() - reference).norm(), (plain.double() - reference).norm()
        norm = reference.norm()
        words = f"error {error:.2e}, eager's own {own:.2e}, norm {norm:.2e}"
        found.append((float(error), float(1.5 * own + allowed * norm + 1e-12), words))
    return found


def compile_eager(module: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """torch.compile with the backend, whole graph, without Inductor."""
    dynamic = options.pop("dynamic", None)
    settings = {"remainder": "eager", **options}
    return torch.compile(module, backend=moepdl, fullgraph=True, dynamic=dynamic, options=settings)
