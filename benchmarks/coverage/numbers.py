"""The rule that outputs are held to: error against a float64 run at most 1.5 times eager's own, plus a little.

The float64 run is the same model with eager's choice of experts: what a top-k picks is not rounding. What asks for
less than float64 in it (`.float()`, `softmax(dtype=)`) is passed over, or it would not be float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["Choices", "Double", "Judged", "judge", "outputs_of"]

SLACK = {torch.float32: 1e-6}
_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_TOPK = (torch.topk, Tensor.topk)
_CASTS = (Tensor.to, Tensor.float, Tensor.type, Tensor.type_as, Tensor.half, Tensor.bfloat16)


class Choices(TorchFunctionMode):
    """Notes the ids of every top-k, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _TOPK:
            self.ids.append(result[1])
        return result


class Double(TorchFunctionMode):
    """Runs in float64 what asks for less, and lets every top-k choose what was noted."""

    def __init__(self, ids: Sequence[Tensor]) -> None:
        super().__init__()
        self.ids = list(ids)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _CASTS:
            result = func(*args, **kwargs)
            return args[0] if args[0].dtype == torch.float64 and result.dtype in _NARROW else _wide(result)
        if kwargs.get("dtype") in _NARROW:
            kwargs["dtype"] = torch.float64
        if func in _TOPK and self.ids:
            ids = self.ids.pop(0)
            return torch.return_types.topk((args[0].gather(kwargs.get("dim", -1), ids), ids))
        return func(*args, **kwargs)


def _wide(value: Tensor) -> Tensor:
    """The result of a cast from integers to a narrow floating dtype, in float64."""
    return torch.Tensor.double(value) if value.dtype in _NARROW else value


@dataclass(frozen=True)
class Judged:
    """error and own: ours and eager's, against float64, relative to the norm; `bad` says what broke the rule."""

    error: float
    own: float
    bad: str


def outputs_of(result: Any) -> list[Tensor]:
    """The floating tensors that a model returned, in order."""
    return [leaf.detach() for leaf in _leaves(result) if leaf.is_floating_point()]


def _leaves(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)


def judge(ours: Any, eager: Any, exact: Any) -> Judged:
    """Hold the outputs of a compiled call to the rule."""
    worst, own_worst = 0.0, 0.0
    mine, plain, reference = outputs_of(ours), outputs_of(eager), outputs_of(exact)
    if not len(mine) == len(plain) == len(reference):
        return Judged(0.0, 0.0, f"{len(mine)} outputs where eager has {len(plain)}")
    for index, (a, b, c) in enumerate(zip(mine, plain, reference, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return Judged(
                worst, own_worst, f"output {index} is {a.dtype}{tuple(a.shape)}, not {b.dtype}{tuple(b.shape)}"
            )
        norm = c.double().norm().item() + 1e-30
        error, own = (a.double() - c.double()).norm().item() / norm, (b.double() - c.double()).norm().item() / norm
        worst, own_worst = max(worst, error), max(own_worst, own)
        if not error <= 1.5 * own + SLACK[torch.float32]:
            return Judged(error, own, f"output {index}: error {error:.1e}, eager's own {own:.1e}")
    return Judged(worst, own_worst, "")


def exactly(call: Callable[[], Any], ids: Sequence[Tensor]) -> Any:
    """The result of a call in float64, with this choice of experts."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), Double(ids):
            return call()
    finally:
        torch.set_default_dtype(before)
