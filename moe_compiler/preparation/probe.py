"""Run a module on probe inputs without touching it, and compare two versions of it by the accuracy rule.

A run happens on copies of the module's parameters and buffers, with a fixed random seed, with gradients of everything
that is floating. Each tensor has one copy, by identity, under however many names it is reached; what the module held is
put back on every way out.

Two versions of a module agree when, in float64, they are the same function, and when, in the model's own dtype, the
error of the new one against the old one in float64 is at most 1.5 times the old one's own error (plus 1e-6, or 1e-3
below fp32, of the norm). That is asked of the results, the gradients, and what a run leaves in buffers and attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from moe_compiler.preparation.module_state import exchange, state_kept, state_left

__all__ = [
    "Call",
    "Outcome",
    "agreement",
    "captured_calls",
    "first_line",
    "larger",
    "made_calls",
    "one_token",
    "run",
    "runs",
    "varies",
    "widths",
]

_SAME_FUNCTION = 1e-5
_WITHOUT_EXACT = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
_TOKENS = 48


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a module."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What a run gave: the floating results, the others, gradients by name (None where there is none), and what it
    left in the module's buffers and attributes.
    """

    values: list[Tensor]
    other: list[Any]
    gradients: dict[str, Tensor | None]
    tracked: bool
    left: dict[str, Any]


def varies(module: nn.Module, call: Call) -> bool:
    """Do two runs with different random seeds differ?"""
    first, second = (_run(module, call, None, tracked=False, seed=seed) for seed in (0, 1))
    return any(not torch.equal(a, b) for a, b in zip(first.values, second.values, strict=True))


def run(module: nn.Module, call: Call, dtype: torch.dtype | None = None) -> Outcome:
    """Call a module on copies of everything that is floating, in `dtype` or as it is; raises what the module raises.

    Gradients are those of a fixed weighted sum of the results. Where the module cannot be differentiated, there are
    none. The module's tensors and Python attributes, the arguments and the random state are left as they were.
    """
    try:
        return _run(module, call, dtype, tracked=True)
    except (RuntimeError, TypeError, NotImplementedError):
        return _run(module, call, dtype, tracked=False)


def _run(module: nn.Module, call: Call, dtype: torch.dtype | None, *, tracked: bool, seed: int = 0) -> Outcome:
    leaves: dict[str, Tensor] = {}

    def leaf(name: str, value: Tensor) -> Tensor:
        """A parameter in the wanted dtype: not copied where it has that dtype, nobody writes into it."""
        made = value.detach()
        if not made.is_floating_point():
            return made
        made = made.to(dtype) if dtype is not None else made
        if tracked:
            leaves[name] = made.requires_grad_()
        return made

    def copied(name: str, value: Tensor) -> Tensor:
        made = value.detach().clone()
        if not made.is_floating_point():
            return made
        made = made.to(dtype) if dtype is not None else made
        if not (tracked and name):
            return made
        leaves[name] = made.requires_grad_()
        return made.clone()  # not a leaf: a module may write into its arguments

    copies = {id(value): leaf(name, value) for name, value in module.named_parameters()}
    copies |= {id(value): copied("", value) for _, value in module.named_buffers()}
    flat, spec = pytree.tree_flatten((call.args, dict(call.kwargs)))
    flat = [copied(f"argument {i}", v) if isinstance(v, Tensor) else v for i, v in enumerate(flat)]
    args, kwargs = pytree.tree_unflatten(flat, spec)
    devices = sorted({v.device.index or 0 for v in copies.values() if v.device.type == "cuda"})
    with torch.random.fork_rng(devices), torch.inference_mode(False), state_kept(module):
        exchange(module, copies)
        torch.manual_seed(seed)
        with torch.set_grad_enabled(tracked):
            out = module(*args, **kwargs)
        left = state_left(module)
    results = pytree.tree_leaves(out)
    values = [value for value in results if isinstance(value, Tensor) and value.is_floating_point()]
    other = [value for value in results if not isinstance(value, Tensor) or not value.is_floating_point()]
    gradients: dict[str, Tensor | None] = {}
    differentiable = [value for value in values if value.requires_grad]
    if differentiable and leaves:
        weights = [_fixed(value) for value in differentiable]
        found = torch.autograd.grad(differentiable, list(leaves.values()), weights, allow_unused=True)
        gradients = dict(zip(leaves, found, strict=True))
    return Outcome([value.detach() for value in values], other, gradients, tracked, left)


def _fixed(value: Tensor) -> Tensor:
    """The same weights for every version of a result."""
    numbers = torch.arange(value.numel(), dtype=torch.float64, device="cpu")
    return torch.cos(1.7 * numbers).to(value.device, value.dtype).reshape(value.shape)


def agreement(old: Callable[[torch.dtype | None], Outcome], new: Callable[[torch.dtype | None], Outcome]) -> float:
    """How far the new version is from the old one in float64, relative to the norm; the largest over all results.

    old(dtype) and new(dtype) run the two versions. Raises ValueError, with the sentence for the user, where they are
    not the same function or the new one is less accurate than the rule allows.
    """
    eager, ours = old(None), new(None)
    _check_structure(eager, ours)
    if eager.gradients and not ours.tracked:
        raise ValueError("it has no gradients")
    try:
        exact: Outcome | None = old(torch.float64)
    except Exception:  # a module may insist on its own dtype
        exact = None
    if exact is not None:
        _check_same_function(exact, new)
    worst = 0.0
    exacts = _pairs(exact, exact) if exact is not None else {}
    for what, (theirs, own) in _pairs(eager, ours).items():
        reference, _ = exacts.get(what, (theirs, theirs))
        error = _distance(own, reference)
        if what in exacts:
            allowed = 1.5 * _distance(theirs, reference) + (1e-6 if own.dtype.itemsize > 2 else 1e-3)
        else:
            allowed = _WITHOUT_EXACT.get(own.dtype, 1e-5)
        if not error <= allowed:
            raise ValueError(f"{what} is off by {error:.1e} of its norm, and {allowed:.1e} is allowed")
        worst = max(worst, error)
    return worst


def _check_same_function(exact: Outcome, new: Callable[[torch.dtype | None], Outcome]) -> None:
    """Compare in float64, where a rounding cannot hide a difference."""
    try:
        wide = new(torch.float64)
    except Exception:  # e.g. a grouped matmul, which torch does not have for float64
        return
    _check_structure(exact, wide)
    for what, (theirs, own) in _pairs(exact, wide).items():
        error = _distance(own, theirs)
        if not error <= _SAME_FUNCTION:
            raise ValueError(f"{what} differs by {error:.1e} of its norm in float64")


def _check_structure(old: Outcome, new: Outcome) -> None:
    before, after = ([(tuple(v.shape), v.dtype) for v in outcome.values] for outcome in (old, new))
    if before != after:
        raise ValueError(f"the results are {after}, not {before}")
    if len(old.other) != len(new.other):
        raise ValueError("there is another number of results")
    for theirs, own in zip(old.other, new.other, strict=True):
        same = torch.equal(theirs, own) if isinstance(theirs, Tensor) and isinstance(own, Tensor) else theirs == own
        if not bool(same):
            raise ValueError("a result that is not floating differs")
    for name in old.left.keys() | new.left.keys():
        if not _left_alike(old.left.get(name), new.left.get(name)):
            raise ValueError(f"it leaves another value in {name}")


def _left_alike(theirs: Any, own: Any) -> bool:
    """Is what two runs left in one place the same, floating tensors apart, which are compared as results are?"""
    if not isinstance(theirs, Tensor) or not isinstance(own, Tensor):
        return type(theirs) is type(own) and bool(theirs == own or (theirs != theirs and own != own))
    if theirs.shape != own.shape or theirs.dtype != own.dtype:
        return False
    return theirs.is_floating_point() or torch.equal(theirs, own)


def _pairs(old: Outcome, new: Outcome) -> dict[str, tuple[Tensor, Tensor]]:
    """(old, new) of each result and gradient, by what it is; a gradient that is None in one of them is zeros."""
    found = {f"result {i}": pair for i, pair in enumerate(zip(old.values, new.values, strict=True))}
    for name, theirs in old.left.items():
        if isinstance(theirs, Tensor) and theirs.is_floating_point():
            found[f"what it leaves in {name}"] = theirs, new.left[name]
    if old.tracked and new.tracked:
        for name in old.gradients.keys() | new.gradients.keys():
            theirs, own = old.gradients.get(name), new.gradients.get(name)
            given = theirs if theirs is not None else own
            if given is not None:
                zeros = torch.zeros_like(given)
                pair = (theirs if theirs is not None else zeros, own if own is not None else zeros)
                found[f"the gradient of {name}"] = pair
    return found


def _distance(value: Tensor, reference: Tensor) -> float:
    """|value - reference| relative to |reference|; infinite where a value is not a number."""
    wide = reference.double()
    difference, norm = (value.double() - wide).norm(), wide.norm()
    if not bool(torch.isfinite(difference)):
        return float("inf")
    return float(difference / norm) if bool(norm > 0) else float(difference)


# Inputs


@contextmanager
def captured_calls(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, Call]]:
    """The arguments of the first call of each module, by name, of what runs in this block."""
    found: dict[str, Call] = {}

    def record(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name not in found:
                flat, spec = pytree.tree_flatten((args, kwargs))
                kept = [value.detach().clone() if isinstance(value, Tensor) else value for value in flat]
                found[name] = Call(*pytree.tree_unflatten(kept, spec))

        return hook

    handles = [
        module.register_forward_pre_hook(record(name), with_kwargs=True, prepend=True)
        for name, module in modules.items()
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def made_calls(module: nn.Module, widths: Sequence[int], experts: int) -> Iterator[Call]:
    """Inputs made from a module's own sizes, the usual ones first: x [1, T, H], x [T, H], and with ids and weights."""
    like = next(iter(module.parameters()), None)
    if like is None:
        return
    options: dict[str, Any] = {"device": like.device, "dtype": like.dtype if like.is_floating_point() else None}
    for width in widths:
        x_TH = _random((_TOKENS, width), **options)
        yield Call((x_TH[None],), {})
        yield Call((x_TH,), {})
        for k in dict.fromkeys(size for size in (_own_k(module), min(2, experts)) if size):
            ids_TK = _random_ids(experts, k, like.device)
            weights_TK = torch.softmax(_random((_TOKENS, k), **options), -1)
            yield Call((x_TH, ids_TK, weights_TK), {})
            yield Call((x_TH, weights_TK, ids_TK), {})


def _own_k(module: nn.Module) -> int:
    names = ("top_k", "num_experts_per_tok", "topk", "n_activated_experts", "moe_k", "num_selected_experts")
    return next((value for name in names if isinstance(value := getattr(module, name, None), int)), 0)


def larger(call: Call, experts: int) -> Call | None:
    """The same call with random tokens and, where they are arguments, random ids and weights; None when that is not
    how the arguments look.
    """
    flat, spec = pytree.tree_flatten((call.args, dict(call.kwargs)))
    tensors = [value for value in flat if isinstance(value, Tensor)]
    ids = [value for value in tensors if value.dtype in (torch.int32, torch.int64)]
    floats = [value for value in tensors if value.is_floating_point()]
    if len(ids) + len(floats) != len(tensors) or not floats or floats[0].dim() < 2:
        return None
    x = next((value for value in floats if not ids or value.shape != ids[0].shape), None)
    if x is None or len(floats) != 1 + len(ids) or len(ids) > 1:
        return None
    k = ids[0].shape[-1] if ids else 0
    if ids and (ids[0].dim() != 2 or x.dim() != 2 or any(v.shape != ids[0].shape for v in floats if v is not x)):
        return None
    made: list[Any] = []
    for value in flat:
        if value is x:
            made.append(_random((*[1] * (x.dim() - 2), _TOKENS, x.shape[-1]), device=x.device, dtype=x.dtype))
        elif ids and value is ids[0]:
            made.append(_random_ids(experts, k, value.device).to(value.dtype))
        elif isinstance(value, Tensor):
            made.append(torch.softmax(_random((_TOKENS, k), device=value.device, dtype=value.dtype), -1))
        else:
            made.append(value)
    return Call(*pytree.tree_unflatten(made, spec))


def one_token(call: Call) -> Call | None:
    """The same call with its first token alone; None when the arguments do not agree on how many tokens there are."""
    flat, spec = pytree.tree_flatten((call.args, dict(call.kwargs)))
    tensors = [value for value in flat if isinstance(value, Tensor)]
    if not tensors or any(value.dim() != tensors[0].dim() or value.dim() not in (2, 3) for value in tensors):
        return None
    if len({value.shape[:-1] for value in tensors}) != 1 or tensors[0].shape[:-1].numel() < 2:
        return None
    first = (slice(0, 1),) * (tensors[0].dim() - 1)
    flat = [value[first].clone() if isinstance(value, Tensor) else value for value in flat]
    return Call(*pytree.tree_unflatten(flat, spec))


def _random(shape: Sequence[int], *, device: Any, dtype: torch.dtype | None) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(tuple(shape), generator=generator).to(device=device, dtype=dtype)


def _random_ids(experts: int, k: int, device: Any) -> Tensor:
    """[T, k] ids, different within a token; the last expert is chosen by nobody when there are enough of them."""
    generator = torch.Generator().manual_seed(8)
    used = experts - 1 if experts > k else experts
    return torch.stack([torch.randperm(used, generator=generator)[:k] for _ in range(_TOKENS)]).to(device)


def widths(module: nn.Module) -> list[int]:
    """Candidates for H: what the matrices of a module take."""
    return list(dict.fromkeys(p.shape[-1] for p in module.parameters() if p.dim() in (2, 3)))[:8]


def runs(module: nn.Module, call: Call) -> bool:
    """Does a module take a call and give floating results?"""
    try:
        outcome = run(module, call)
    except Exception:  # any error means: not a call that this module takes
        return False
    return bool(outcome.values)


def first_line(error: BaseException) -> str:
    """An error for a sentence."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
