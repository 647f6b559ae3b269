"""Plain PyTorch forms of "each token runs its experts, weighted, summed" that become one graph.

What `moe_compiler.prepare` puts in the place of a loop that cannot: a loop over all experts, in which each picks its
rows by comparing the ids. It is the spelling that the finder knows as `where_loop`, and right for any number of rows of
an expert, none among them. Experts are called as they are (modules of a list) or written out (packed parameters).

Shapes: x [T, H], ids [T, k] (an id outside of 0 .. E-1 contributes nothing), weights [T, k] -> y [T, H].
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["ExpertBank", "Holding", "Shape", "banks_of", "dispatcher", "holding"]


@dataclass(frozen=True)
class Shape:
    """How the loop's operands and its result are shaped.

    k:      experts a token
    flat:   the result is [T, H] although the tokens have more dimensions in front
    dtype:  the operand whose dtype the result has, "x" or "weights"; "" keeps the dtype of the sum
    """

    k: int
    flat: bool
    dtype: str


@dataclass(frozen=True)
class ExpertBank:
    """Where a module keeps its experts and how one of them is run.

    what:    for people, e.g. `experts: 8 modules`
    count:   E
    width:   H, 0 when it is not known
    experts: module -> one callable an expert, rows [n, H] -> rows [n, H]
    """

    what: str
    count: int
    width: int
    experts: Callable[[nn.Module], Iterable[Callable[[Tensor], Tensor]]]


def dispatcher(bank: ExpertBank, shape: Shape) -> Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]:
    """The loop over all experts of a bank, as a function (module, x, ids, weights) -> y."""

    def dispatch(module: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        x_TH = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        ids_TK = ids if ids.dim() == 2 and ids.shape[1] == shape.k else ids.reshape(-1, shape.k)
        weights_TK = weights if weights.shape == ids_TK.shape else weights.reshape(-1, shape.k)
        y_TH: Tensor | None = None
        for number, expert in enumerate(bank.experts(module)):
            token, choice = torch.where(ids_TK == number)
            rows = expert(x_TH[token]) * weights_TK[token, choice, None]
            if y_TH is None:
                y_TH = torch.zeros(x_TH.shape[0], rows.shape[-1], dtype=rows.dtype, device=rows.device)
            y_TH.index_add_(0, token, rows)
        assert y_TH is not None
        if shape.dtype:
            y_TH = y_TH.to(x.dtype if shape.dtype == "x" else weights.dtype)
        return y_TH if shape.flat or x.dim() == 2 else y_TH.reshape(x.shape)

    return dispatch


@dataclass(frozen=True)
class Holding:
    """That a module holds experts: how many, and H where it is known (else 0)."""

    count: int
    width: int


def holding(module: nn.Module) -> Holding | None:
    """What experts a module holds, whether or not one of our forms can run them; None when it holds none.

    Experts are the modules of a list or dict that are MLPs, or at least two parameters [E, ., .] in the module or in a
    child of it, or at least two [E * I, H] where the module or the child names E. Modules that hold experts themselves
    are layers, not experts.
    """
    for bank in _module_banks(module):
        return Holding(bank.count, bank.width)
    for owner in (module, *module.children()):
        packed = [value for value in owner.parameters(recurse=False) if value.dim() == 3 and value.shape[0] > 1]
        if len(packed) > 1:
            # Experts that only pass their rows on may have no part in one of the parameters.
            return Holding(max(value.shape[0] for value in packed), 0)
        flat = [value for value in owner.parameters(recurse=False) if value.dim() == 2]
        if len(flat) > 1 and len({value.shape for value in flat}) == 1:
            rows, width = flat[0].shape
            counts = {count for named in (module, owner) for count in _named_counts(named) if rows % count == 0}
            if counts:
                return Holding(max(counts), width)
    return None


def _named_counts(module: nn.Module) -> Iterator[int]:
    """The numbers of experts that a module's attributes name: num_experts, moe_num_experts, n_routed_experts."""
    for name, value in vars(module).items():
        if isinstance(value, int) and value > 1 and "expert" in name and {"num", "n"} & set(name.split("_")):
            yield value


def banks_of(module: nn.Module) -> Iterator[ExpertBank]:
    """The experts of a module: E modules in a list or dict of its own, or packed parameters of it or of a child.

    Packed parameters can be read in several ways (which dimension is H, which half is the gate, which activation); each
    way is a bank of its own, the usual ones first, and a comparison with the original says which one is meant.
    """
    yield from _module_banks(module)
    yield from _packed_banks(module, ())
    for name, child in module.named_children():
        if not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _packed_banks(child, (name,))


# Experts that are modules


def _module_banks(module: nn.Module) -> Iterator[ExpertBank]:
    places: list[tuple[tuple[str, ...], nn.Module]] = [((), module)]
    places += [((name,), child) for name, child in module.named_children()]
    for path, container in places:
        if not isinstance(container, (nn.ModuleList, nn.ModuleDict)):
            continue
        experts = _experts_in(container)
        found = [expert for expert in experts if _is_expert(expert)]
        if len(found) < 2 or any(_has_parameters(expert) for expert in experts if expert not in found):
            continue
        name = ".".join(path) or "its modules"
        yield ExpertBank(f"{name}: {len(experts)} modules", len(experts), _width(found[0]), _Modules(path))


def expert_modules(container: nn.Module) -> list[tuple[str, nn.Module]]:
    """The experts of a list or dict by their names in it, where all with parameters are MLPs alike; else none."""
    if not isinstance(container, (nn.ModuleList, nn.ModuleDict)):
        return []
    found = [(name, module) for name, module in container.named_children() if _has_parameters(module)]
    layouts = {tuple((name, p.shape) for name, p in expert.named_parameters()) for _, expert in found}
    return found if len(found) > 1 and len(layouts) == 1 and all(_is_expert(expert) for _, expert in found) else []


def _experts_in(container: nn.ModuleList | nn.ModuleDict) -> list[nn.Module]:
    """The modules of a list, by number; of a dict those with parameters, which may stand beside a dropout."""
    if isinstance(container, nn.ModuleDict):
        return [module for module in container.values() if _has_parameters(module)]
    return list(container)


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _is_expert(module: nn.Module) -> bool:
    """An MLP: one matrix maps H to I, another I back to H, and so do all the others, but for low-rank ones (adapters).

    A layer with attention is none, so a list of decoder layers is no list of experts.
    """
    if any(holding(part) is not None for part in module.modules()):
        return False
    shapes = [tuple(parameter.shape) for parameter in module.parameters() if parameter.dim() == 2]
    pairs = ((a, b) for i, a in enumerate(shapes) for b in shapes[i + 1 :] if a == b[::-1])
    first = next(pairs, None)
    return first is not None and all(shape in first or min(shape) < min(first[0]) for shape in shapes)


def _width(expert: nn.Module) -> int:
    return next((parameter.shape[1] for parameter in expert.parameters() if parameter.dim() == 2), 0)


@dataclass(frozen=True)
class _Modules:
    path: tuple[str, ...]

    def __call__(self, module: nn.Module) -> Iterable[Callable[[Tensor], Tensor]]:
        container = _at(module, self.path)
        assert isinstance(container, (nn.ModuleList, nn.ModuleDict))
        return _experts_in(container)


def _at(module: nn.Module, path: Sequence[str]) -> nn.Module:
    for name in path:
        module = getattr(module, name)
    return module


# Packed parameters


@dataclass(frozen=True)
class _Matrix:
    """A packed parameter by name; `across` when it is stored [E, in, out]."""

    name: str
    across: bool

    def of(self, module: nn.Module, expert: int, rows: Tensor) -> Tensor:
        weight = getattr(module, self.name)[expert]
        return rows @ weight if self.across else F.linear(rows, weight)


@dataclass(frozen=True)
class _Packed:
    """E experts in packed parameters: act(gate) * up, halves of one matmul, or act alone; then down."""

    path: tuple[str, ...]
    count: int
    gate: _Matrix
    up: _Matrix | None
    down: _Matrix
    halves: str  # "", "gate first", "up first"
    act: str

    def __call__(self, module: nn.Module) -> Iterable[Callable[[Tensor], Tensor]]:
        owner = _at(module, self.path)
        return [functools.partial(self.run, owner, number) for number in range(self.count)]

    def run(self, owner: nn.Module, expert: int, rows: Tensor) -> Tensor:
        """Rows [n, H] through one expert."""
        act = _ACTIVATIONS.get(self.act) or getattr(owner, self.act)
        first = self.gate.of(owner, expert, rows)
        if self.halves:
            gate, up = first.chunk(2, dim=-1)
            middle = act(gate) * up if self.halves == "gate first" else act(up) * gate
        else:
            middle = act(first) if self.up is None else act(first) * self.up.of(owner, expert, rows)
        return self.down.of(owner, expert, middle)


def _relu2(rows: Tensor) -> Tensor:
    return F.relu(rows).square()


def _gelu_tanh(rows: Tensor) -> Tensor:
    return F.gelu(rows, approximate="tanh")


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu(tanh)": _gelu_tanh,
    "relu": F.relu,
    "relu squared": _relu2,
}


def _packed_banks(owner: nn.Module, path: tuple[str, ...]) -> Iterator[ExpertBank]:
    packed = {name: value for name, value in owner.named_parameters(recurse=False) if value.dim() == 3}
    counts = {value.shape[0] for value in packed.values()}
    if not 2 <= len(packed) <= 3 or len(counts) != 1:
        return
    (count,) = counts
    other = [name for name, value in owner.named_parameters(recurse=False) if value.dim() != 3]
    if count < 2 or other:
        return  # biases and scales are more than these forms know
    widths = dict.fromkeys(size for name in packed for size in packed[name].shape[1:])
    acts = [*_own_activations(owner), *_ACTIVATIONS]
    for hidden in widths:
        for gate, up, down, halves in _layouts(packed, hidden):
            for act in acts:
                experts = _Packed(path, count, gate, up, down, halves, act)
                names = ", ".join(".".join([*path, matrix.name]) for matrix in (gate, up, down) if matrix is not None)
                yield ExpertBank(f"{names}: {count} packed experts, {act}", count, hidden, experts)


def _own_activations(owner: nn.Module) -> list[str]:
    """The attributes of a module that may be its activation: callables without parameters."""
    found = [name for name, child in owner.named_children() if not _has_parameters(child)]
    return found + [name for name, value in vars(owner).items() if callable(value) and not name.startswith("_")]


def _layouts(packed: dict[str, Any], hidden: int) -> Iterator[tuple[_Matrix, _Matrix | None, _Matrix, str]]:
    """Ways to read the parameters for rows of `hidden` numbers: (gate, up, down, which half is which)."""
    for down_name in reversed(packed):
        down_shape = packed[down_name].shape[1:]
        first = [name for name in packed if name != down_name]
        for down_across in (False, True):
            inner, out = down_shape if down_across else reversed(down_shape)
            if out != hidden:
                continue
            for across in (False, True):
                sizes = [
                    packed[name].shape[1:] if across else tuple(reversed(packed[name].shape[1:])) for name in first
                ]
                down = _Matrix(down_name, down_across)
                matrices = [_Matrix(name, across) for name in first]
                if len(first) == 2 and all(tuple(size) == (hidden, inner) for size in sizes):
                    yield matrices[0], matrices[1], down, ""
                    yield matrices[1], matrices[0], down, ""
                elif len(first) == 1 and tuple(sizes[0]) == (hidden, 2 * inner):
                    yield matrices[0], None, down, "gate first"
                    yield matrices[0], None, down, "up first"
                elif len(first) == 1 and tuple(sizes[0]) == (hidden, inner):
                    yield matrices[0], None, down, ""
