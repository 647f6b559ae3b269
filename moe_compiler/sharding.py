"""`expert_parallel(model, mesh)`: keep this rank's share of the experts of a model, and leave its code as it is.

Each parameter of an expert keeps its name and holds this rank's share alone. Reading the attribute gives the whole
tensor, gathered from all ranks by an operator that is differentiable: the gradient of a share is the sum over the
ranks. So the model's own code computes what it did before, in eager too, only slowly; and where `torch.compile` with
the backend moepdl finds the block, the tokens travel instead of the weights and the gathers are gone
(passes/shard_experts.py).

Experts are the modules of a list or dict that are MLPs, or parameters [E, ..] of one module, at least two of them of
three dimensions. What holds no share (attention, routers, shared experts) is left to other kinds of parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from moe_compiler.errors import PrepareError
from moe_compiler.preparation.expert_dispatch import expert_modules, holding
from moe_compiler.runtime_kernels import register as _register  # noqa: F401 - defines torch.ops.moepdl
from moe_compiler.runtime_kernels.exchange.groups import Group, group
from moe_compiler.runtime_kernels.exchange.placement import PLACEMENTS, PlacementError, check_placement, owned, owner

__all__ = ["Sharded", "expert_parallel", "full_state_dict"]

_ops = torch.ops.moepdl
_SHARES = "_moepdl_shares"
# Attribute of an instance: its path in the model that was sharded.
_PATH = "_moepdl_path"


@dataclass(frozen=True)
class Sharded:
    """What was done to one module that holds experts.

    path:       of the module in the model; kind: "packed" (parameters [E, ..]) or "modules" (a list or dict of them)
    experts:    E; own: the experts of this rank; ranks, rank, group, placement: among whom, and how
    parameters: names of the parameters in the model that hold a share now
    kept, whole: bytes of them on this rank, now and before
    """

    path: str
    kind: str
    experts: int
    own: tuple[int, ...]
    rank: int
    ranks: int
    group: str
    placement: str
    parameters: tuple[str, ...]
    kept: int
    whole: int

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.own[:4])) + (", ..." if len(self.own) > 4 else "")
        return (
            f"{self.path or 'the model'}: rank {self.rank} of {self.ranks} keeps {len(self.own)} of {self.experts} "
            f"experts ({shown}; {self.placement}), {self.kept / 1e6:.3g} of {self.whole / 1e6:.3g} MB"
        )


@dataclass(frozen=True)
class _Packed:
    """A parameter [E, ..] of which a rank holds [E_local, ..]."""

    group: str
    experts: int
    placement: str
    own: range
    shape: tuple[int, ...]

    def read(self, local: Tensor, name: str) -> Tensor:
        return _ops.gather_experts(local, self.group, self.experts, self.placement, name)

    def share(self, whole: Tensor) -> Tensor:
        return whole[self.own.start : self.own.stop : self.own.step]


@dataclass(frozen=True)
class _Single:
    """A parameter of one expert, which one rank holds and the others as [0, ..]."""

    group: str
    owner: int
    mine: bool
    shape: tuple[int, ...]

    def read(self, local: Tensor, name: str) -> Tensor:
        return _ops.gather_expert(local, self.group, self.owner, list(self.shape), name)

    def share(self, whole: Tensor) -> Tensor:
        return whole if self.mine else whole[:0]


_Share = _Packed | _Single


def expert_parallel(
    model: nn.Module, mesh: Any, *, placement: str = "contiguous", modules: Sequence[str] | None = None
) -> list[Sharded]:
    """Keep this rank's share of every expert of `model`, in place, and return what was done, one entry a module.

    mesh:      a DeviceMesh of one dimension, or a process group: the ranks that share the experts
    placement: "contiguous" (neighbouring experts on a rank) or "round_robin" (expert e on rank e % R); where E is not
               divisible by the ranks, some have one expert more
    modules:   paths of the modules that hold the experts; by default they are looked for

    Every rank calls it with the same model (before the optimizer is made, and before DistributedDataParallel, which
    is told to leave these parameters alone). Raises PrepareError, with nothing changed, when nothing is found, for
    fewer experts than ranks, for quantised or shared parameters and for DTensors.
    """
    ranks = _group_of(mesh)
    if placement not in PLACEMENTS:
        raise PrepareError(
            f"placement {placement!r} is not known",
            why=f"one of {', '.join(PLACEMENTS)}",
            try_='placement="contiguous"',
        )
    already = next((path for path, module in model.named_modules() if hasattr(type(module), _SHARES)), None)
    if already is not None:
        raise PrepareError(
            f"the experts of this model are shared between ranks already, first those of {already or 'the model'}",
            why="a share cannot be shared again",
            try_="call expert_parallel once a model",
        )
    found = list(_named(model, modules) if modules is not None else _search(model))
    if not found:
        raise PrepareError(
            "no experts were found in this model",
            why="looked for lists of modules that are MLPs, and for modules with two parameters [E, ., .] or more",
            try_='expert_parallel(model, mesh, modules=["layers.0.mlp.experts", ...]) names the modules that hold them',
        )
    _check_all_reached(model, found)
    plans = [_plan(path, module, ranks, placement) for path, module in found]
    _check_not_shared(model, plans)
    done = [_apply(plan, ranks, placement) for plan in plans]
    _leave_to_us(model, [name for one in done for name in one.parameters])
    return done


def _group_of(mesh: Any) -> Group:
    """The ranks of a mesh of one dimension, or of a process group."""
    if isinstance(mesh, torch.distributed.ProcessGroup):
        return group(mesh.group_name)
    if not hasattr(mesh, "get_group") or not hasattr(mesh, "ndim"):
        raise PrepareError(
            f"expert_parallel got {type(mesh).__name__} as its mesh",
            why="it needs to know the ranks that share the experts",
            try_='torch.distributed.device_mesh.init_device_mesh("cuda", (ranks,)), or a process group',
        )
    if mesh.ndim != 1:
        raise PrepareError(
            f"the mesh has {mesh.ndim} dimensions",
            why="experts are shared along one",
            try_=f'mesh["ep"], where "ep" is the dimension that shares them; this mesh has {mesh.mesh_dim_names}',
        )
    return group(mesh.get_group().group_name)


# Finding the experts


def _search(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that hold experts: the lists or dicts, and those with packed parameters."""
    for path, module in model.named_modules():
        parent = model.get_submodule(path.rpartition(".")[0]) if path else None
        if expert_modules(module) or (_packed(module) and (parent is None or _routed(parent, module))):
            yield path, module


def _named(model: nn.Module, modules: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    known = dict(model.named_modules())
    for path in modules:
        module = known.get(path)
        if module is None or not (expert_modules(module) or _packed(module)):
            raise PrepareError(
                f"{path!r} holds no experts" if module is not None else f"the model has no module {path!r}",
                why="a module of experts is a list or dict of equal modules, or has at least two parameters [E, ., .]",
                try_="one of " + (", ".join(path for path, _ in _search(model)) or "model.named_modules()"),
            )
        yield path, module


def _packed(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters [E, ..] of a module that has at least two of three dimensions, all of one E; {} for any other."""
    three = [p for p in module.parameters(recurse=False) if p.dim() == 3 and p.shape[0] > 1]
    if len(three) < 2 or len({p.shape[0] for p in three}) != 1:
        return {}
    named = module.named_parameters(recurse=False)
    return {name: p for name, p in named if p.dim() >= 2 and p.shape[0] == three[0].shape[0]}


def _routed(parent: nn.Module, module: nn.Module) -> bool:
    """Is there a parameter with a dimension E beside the packed ones: the router that tells the experts apart?"""
    experts = next(iter(_packed(module).values())).shape[0]
    inside = set(map(id, module.parameters()))
    return any(experts in parameter.shape for parameter in parent.parameters() if id(parameter) not in inside)


def _check_all_reached(model: nn.Module, found: list[tuple[str, nn.Module]]) -> None:
    """Nothing that holds experts may be passed over in silence."""
    reached = {id(part) for _, module in found for part in module.modules()}
    for path, module in model.named_modules():
        written = type(module).forward is not nn.Module.forward
        if not written or holding(module) is None or any(id(part) in reached for part in module.modules()):
            continue
        raise PrepareError(
            f"the experts of {path or 'the model'} ({type(module).__name__}) cannot be shared between ranks",
            why="their parameters do not have the experts as first dimension, or are not all in one module",
            try_="name the modules that can: expert_parallel(model, mesh, modules=[...])",
        )


# What becomes of a parameter


@dataclass(frozen=True)
class _Plan:
    """What is to become of one module's experts.

    shares: by name in the model, the module that has the parameter, its name there, and its share.
    """

    path: str
    kind: str
    experts: int
    shares: dict[str, tuple[nn.Module, str, _Share]]


def _plan(path: str, module: nn.Module, ranks: Group, placement: str) -> _Plan:
    plan: dict[str, tuple[nn.Module, str, _Share]] = {}
    listed = expert_modules(module)
    kind = "modules" if listed else "packed"
    experts = len(listed) if listed else next(iter(_packed(module).values())).shape[0]
    try:
        check_placement(experts, ranks.ranks, placement)
    except PlacementError as error:
        raise PrepareError(
            f"{path or 'the model'}: {error}", try_="a smaller group, or a model with more experts"
        ) from error
    if not listed:
        own = owned(experts, ranks.ranks, ranks.rank, placement)
        for name, parameter in _packed(module).items():
            share: _Share = _Packed(ranks.name, experts, placement, own, tuple(parameter.shape))
            plan[f"{path}.{name}" if path else name] = (module, name, share)
    for number, (name, expert) in enumerate(listed):
        keeper = owner(number, experts, ranks.ranks, placement)
        for inner, part in expert.named_modules(prefix=f"{path}.{name}" if path else name):
            for own_name, parameter in part.named_parameters(recurse=False):
                share = _Single(ranks.name, keeper, keeper == ranks.rank, tuple(parameter.shape))
                plan[f"{inner}.{own_name}"] = (part, own_name, share)
    for full, (holder, name, _) in plan.items():
        _check_parameter(full, holder._parameters[name])
    return _Plan(path, kind, experts, plan)


def _check_not_shared(model: nn.Module, plans: Sequence[_Plan]) -> None:
    """A parameter that is to be a share may have one name only."""
    planned = {name for plan in plans for name in plan.shares}
    first_name: dict[int, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for own_name, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = f"{path}.{own_name}" if path else own_name
            first = first_name.setdefault(id(parameter), name)
            if first != name and planned & {first, name}:
                raise PrepareError(
                    f"the parameter {name} is also {first}",
                    why="an expert's parameter that is used elsewhere too cannot be given away",
                    try_="give each its own parameter",
                )


def _check_parameter(name: str, parameter: Tensor | None) -> None:
    assert parameter is not None
    if type(parameter).__name__ == "DTensor" or hasattr(parameter, "placements"):
        raise PrepareError(
            f"{name} is a DTensor already",
            why="its placement would have to be kept, and the share is cut from a plain tensor",
            try_="call expert_parallel before fully_shard or parallelize_module",
        )
    if not parameter.dtype.is_floating_point or parameter.dtype.itemsize == 1:
        raise PrepareError(
            f"the experts are quantised: {name} is {str(parameter.dtype).removeprefix('torch.')}",
            why="quantised experts are left as they are",
            try_="load the model in bfloat16, float16 or float32",
        )


def _apply(plan: _Plan, ranks: Group, placement: str) -> Sharded:
    kept = whole = 0
    by_module: dict[int, tuple[nn.Module, dict[str, _Share]]] = {}
    for full, (holder, name, share) in plan.shares.items():
        parameter = holder._parameters[name]
        assert parameter is not None
        with torch.no_grad():
            mine = share.share(parameter.detach()).clone()
        holder._parameters[name] = nn.Parameter(mine, requires_grad=parameter.requires_grad)
        kept, whole = kept + mine.nbytes, whole + parameter.nbytes
        holder.__dict__[_PATH] = full.rpartition(".")[0]
        by_module.setdefault(id(holder), (holder, {}))[1][name] = share
    for holder, shares in by_module.values():
        holder.__class__ = _class_of(type(holder), tuple(shares.items()))  # type: ignore[arg-type]
    own = tuple(owned(plan.experts, ranks.ranks, ranks.rank, placement))
    names = tuple(plan.shares)
    return Sharded(
        plan.path, plan.kind, plan.experts, own, ranks.rank, ranks.ranks, ranks.name, placement, names, kept, whole
    )


@cache
def _class_of(base: type, shares: tuple[tuple[str, _Share], ...]) -> type:
    """`base` with attributes that read shares whole. Equal modules have one class, so Dynamo compiles them once."""
    known = dict(shares)

    def register_parameter(self: Any, name: str, param: Any) -> None:
        # nn.Module would ask whether the attribute is there, and reading it is a collective.
        if name in known:
            self._parameters[name] = param
        else:
            base.register_parameter(self, name, param)  # type: ignore[attr-defined]

    def _load_from_state_dict(self: Any, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name, share in known.items():
            value = state_dict.get(prefix + name)
            if isinstance(value, Tensor) and tuple(value.shape) == share.shape:
                state_dict[prefix + name] = share.share(value)
        base._load_from_state_dict(self, state_dict, prefix, *rest)  # type: ignore[attr-defined]

    members: dict[str, Any] = {name: property(_reader(name, share)) for name, share in shares}
    members |= {
        "register_parameter": register_parameter,
        "_load_from_state_dict": _load_from_state_dict,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        _SHARES: known,
    }
    return type(base.__name__, (base,), members)


def _reader(name: str, share: _Share) -> Callable[[Any], Tensor]:
    """The attribute's getter, in a form that Dynamo traces.

    Which layer it is goes with the weight in eager alone: there ranks may be at different ones. In a compiled graph the
    order is fixed, and equal layers are one code as long as nothing in it names them.
    """
    if isinstance(share, _Packed):
        ranks, experts, placement = share.group, share.experts, share.placement

        def packed(self: Any) -> Tensor:
            full = name if torch.compiler.is_compiling() else f"{self.__dict__[_PATH]}.{name}"
            return torch.ops.moepdl.gather_experts(self._parameters[name], ranks, experts, placement, full)

        return packed
    ranks, keeper, shape = share.group, share.owner, list(share.shape)

    def single(self: Any) -> Tensor:
        full = name if torch.compiler.is_compiling() else f"{self.__dict__[_PATH]}.{name}"
        return torch.ops.moepdl.gather_expert(self._parameters[name], ranks, keeper, shape, full)

    return single


def _leave_to_us(model: nn.Module, names: list[str]) -> None:
    """DistributedDataParallel would copy rank 0's experts to all ranks, and average gradients of different experts."""
    before = list(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    ignored = before + [name for name in names if name not in before]
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state of the whole model, experts of all ranks included, as `model.state_dict()` had it before.

    A collective: every rank of the group calls it, and every rank gets all of it.
    """
    found = model.state_dict()
    for path, module in model.named_modules():
        for name, share in getattr(type(module), _SHARES, {}).items():
            full = f"{path}.{name}" if path else name
            local = module._parameters[name]
            if full in found and local is not None:
                with torch.no_grad():
                    found[full] = share.read(local.detach(), full)
    return found
