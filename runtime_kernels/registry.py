"""The table of kernels: what each reads and writes, its plain-torch reference and its launch on a device.

A chain (`chain/program.py`) names kernels by the names in this table, and the compiler reasons about them through
their `Traits` alone. Nothing here imports torch operators or triton: `Kernel.reference` and `Kernel.launch` import
their module when they are first used, so a machine without a GPU never imports device code.

Where the code lives: kernel `NAME` of folder `F` has its reference in `F/reference.py` and its launch in
`F/launch.py`, both as a function called `NAME`.

    reference(**ins, **attrs) -> Tensor | tuple     allocates; one result a name in `traits.writes`, in that order;
                                                    a list-valued write is a list of tensors
    launch(outs, ins, attrs, *, pdl) -> None        writes into the given buffers on the current stream; with
                                                    `traits.tiled` also tile=None, the tile to take

`ins` holds every name of `traits.reads` (None for an optional operand that is absent; a list for expert weights).
`outs` may lack an optional write (see `Traits.optional_writes`): it is then not computed. `attrs` are the keyword
arguments of the reference which are no tensors; data types are `torch.dtype` objects. A launch is never called when
all of its outputs are empty; with zero tokens it must still write the outputs that are not (`starts`, weight
gradients). Integer operands named `ids` may be int32 or int64 of any strides; `perm`, `starts` are contiguous int32.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

PACKAGE = "moe_compiler.runtime_kernels"


class UnknownKernelError(KeyError, ValueError):
    """A kernel name that is not in the table; the message lists the names that are."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Traits:
    """What the planner and the PDL verifier need to know of a kernel.

    reads, writes    parameter names, in the order of the reference's arguments and results
    weights          those of `reads` which are constant during a chain: they may be read before the PDL wait
    optional_reads   those of `reads` which may be None
    optional_writes  those of `writes` which a launch may leave out
    by_token         parameters (read or written) whose row t belongs to token t alone: they can be cut by tokens
    shared           those of `reads` besides the weights which all tokens share, whatever their number
    lists            parameters (read or written) which are lists of tensors
    tiled            whether a launch takes `tile`, how it divides its work (see `tiles.Tile`)
    waits, triggers  whether the kernel, launched with the PDL attribute, executes griddepcontrol.wait and
                     griddepcontrol.launch_dependents
    min_arch         smallest CUDA compute capability (major * 10 + minor) that the kernel supports; None: CPU only
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    weights: tuple[str, ...] = ()
    waits: bool = True
    triggers: bool = True
    min_arch: int | None = 80
    optional_reads: tuple[str, ...] = ()
    optional_writes: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    by_token: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    tiled: bool = False


@dataclass(frozen=True)
class Kernel:
    """A kernel of the table. `reference` and `launch` resolve their module on first use."""

    name: str
    folder: str
    traits: Traits

    @cached_property
    def reference(self) -> Callable[..., Any]:
        """The plain-torch function: specification, CPU implementation and oracle."""
        return getattr(importlib.import_module(f"{PACKAGE}.{self.folder}.reference"), self.name)

    @cached_property
    def launch(self) -> Callable[..., None]:
        """The device launch. Raises NotImplementedError for a kernel of the CPU plan."""
        if self.traits.min_arch is None:
            raise NotImplementedError(f"kernel {self.name!r} runs on the CPU only; a CUDA plan must not name it")
        return getattr(importlib.import_module(f"{PACKAGE}.{self.folder}.launch"), self.name)


def _table(*kernels: Kernel) -> dict[str, Kernel]:
    return {k.name: k for k in kernels}


_PROJECTIONS = ("gate", "up", "down")
_BIASES = ("gate_bias", "up_bias", "down_bias")
_GRADIENTS = tuple(f"grad_{name}" for name in (*_PROJECTIONS, *_BIASES))

_KERNELS = _table(
    # (x [T,H], router [H,E], router_bias [E]) -> logits [T,E]
    Kernel(
        "router_logits",
        "router_logits",
        Traits(
            reads=("x", "router", "router_bias"),
            writes=("logits",),
            weights=("router", "router_bias"),
            optional_reads=("router_bias",),
            by_token=("x", "logits"),
            tiled=True,
        ),
    ),
    # (logits [T,E], bias [E], expert_scale [E]) -> weights [T,k], ids [T,k] int64
    #   attrs: k, score, order, groups, kept_groups, group_top, fill, renormalize, clamp, eps, scale, score_dtype, dtype
    Kernel(
        "route",
        "route",
        Traits(
            reads=("logits", "bias", "expert_scale"),
            writes=("weights", "ids"),
            optional_reads=("bias", "expert_scale"),
            by_token=("logits", "weights", "ids"),
            shared=("bias", "expert_scale"),
        ),
    ),
    # -> grad_logits [T,E], grad_expert_scale [E];  attrs: score, order, renormalize, clamp, eps, scale, score_dtype
    Kernel(
        "route_backward",
        "route",
        Traits(
            reads=("grad_weights", "logits", "ids", "expert_scale"),
            writes=("grad_logits", "grad_expert_scale"),
            optional_reads=("expert_scale",),
            optional_writes=("grad_expert_scale",),
            by_token=("grad_weights", "logits", "ids", "grad_logits"),
            shared=("expert_scale",),
        ),
    ),
    # ids [T,k] -> perm int32 [S], starts int32 [E+1];  attrs: num_experts.  One program: few pairs.
    Kernel("order", "order", Traits(reads=("ids",), writes=("perm", "starts"), by_token=("ids",))),
    # ids -> counts int32 [ceil(S / ORDER_BLOCK), E], the pairs of each block of each expert;  attrs: num_experts
    Kernel("order_count", "order", Traits(reads=("ids",), writes=("counts",), by_token=("ids",))),
    # attrs: num_experts
    Kernel("order_scatter", "order", Traits(reads=("ids", "counts"), writes=("perm", "starts"), by_token=("ids",))),
    # -> act [S,I], preact [S,N] (optional), both in sorted row order;  attrs: k, activation, gated, save
    Kernel(
        "gate_up",
        "gate_up",
        Traits(
            reads=("x", "weights", "perm", "starts", "gate", "up", "gate_bias", "up_bias"),
            writes=("act", "preact"),
            weights=("gate", "up", "gate_bias", "up_bias"),
            optional_reads=("weights", "gate_bias", "up_bias"),
            optional_writes=("preact",),
            lists=("gate", "up", "gate_bias", "up_bias"),
            by_token=("x", "weights"),
            tiled=True,
        ),
    ),
    # -> act [S,I] in PAIR order, without a sort;  attrs: activation, gated
    Kernel(
        "gate_up_few",
        "gate_up",
        Traits(
            reads=("x", "weights", "ids", "gate", "up", "gate_bias", "up_bias"),
            writes=("act",),
            weights=("gate", "up", "gate_bias", "up_bias"),
            optional_reads=("weights", "gate_bias", "up_bias"),
            lists=("gate", "up", "gate_bias", "up_bias"),
            by_token=("x", "weights", "ids"),
            tiled=True,
        ),
    ),
    # -> pairs [S,H] in pair order, rows of ids out of range are zero
    Kernel(
        "down",
        "down",
        Traits(
            reads=("act", "perm", "starts", "down", "down_bias"),
            writes=("pairs",),
            weights=("down", "down_bias"),
            optional_reads=("down_bias",),
            lists=("down", "down_bias"),
            tiled=True,
        ),
    ),
    # act in pair order -> y [T,H], summed over k in the kernel;  attrs: dtype
    Kernel(
        "down_few",
        "down",
        Traits(
            reads=("act", "ids", "weights", "down", "down_bias"),
            writes=("y",),
            weights=("down", "down_bias"),
            optional_reads=("weights", "down_bias"),
            lists=("down", "down_bias"),
            by_token=("ids", "weights", "y"),
            tiled=True,
        ),
    ),
    # -> y [T,H];  attrs: k, dtype
    Kernel(
        "combine",
        "combine",
        Traits(
            reads=("pairs", "weights"),
            writes=("y",),
            optional_reads=("weights",),
            by_token=("weights", "y"),
            tiled=True,
        ),
    ),
    # -> grad_preact [S,N], act [S,I] (times w), grad_weights [T,k] fp32 (optional);  attrs: k, activation, gated,
    #   turns (False): the columns of grad_preact are those of gate and up in turns, as the rows of their weights are
    Kernel(
        "grad_act",
        "grad_act",
        Traits(
            reads=("grad_y", "weights", "preact", "perm", "starts", "down", "down_bias"),
            writes=("grad_preact", "act", "grad_weights"),
            weights=("down", "down_bias"),
            optional_reads=("weights", "down_bias"),
            optional_writes=("act", "grad_weights"),
            lists=("down", "down_bias"),
            by_token=("grad_y", "weights", "grad_weights"),
            tiled=True,
        ),
    ),
    # `down` gives the layout only: its data is not read.  -> grad_down like down;  attrs: k
    Kernel(
        "grad_down",
        "grad_weights",
        Traits(
            reads=("grad_y", "act", "perm", "starts", "down"),
            writes=("grad_down",),
            weights=("down",),
            lists=("down", "grad_down"),
            by_token=("grad_y",),
            tiled=True,
        ),
    ),
    # `gate`, `up` give the layout only.  -> grad_gate like gate, grad_up like up;  attrs: k, gated
    Kernel(
        "grad_gate_up",
        "grad_weights",
        Traits(
            reads=("x", "weights", "grad_preact", "perm", "starts", "gate", "up"),
            writes=("grad_gate", "grad_up"),
            weights=("gate", "up"),
            optional_reads=("weights",),
            lists=("gate", "up", "grad_gate", "grad_up"),
            by_token=("x", "weights"),
            tiled=True,
        ),
    ),
    # `down_bias` gives the layout only.  -> grad_down_bias like down_bias (rows times w where given);  attrs: k
    Kernel(
        "grad_down_bias",
        "grad_biases",
        Traits(
            reads=("grad_y", "weights", "perm", "starts", "down_bias"),
            writes=("grad_down_bias",),
            weights=("down_bias",),
            optional_reads=("weights",),
            lists=("down_bias", "grad_down_bias"),
            by_token=("grad_y", "weights"),
        ),
    ),
    # `gate_bias`, `up_bias` give the layout only.  -> gradients like them
    Kernel(
        "grad_gate_up_bias",
        "grad_biases",
        Traits(
            reads=("grad_preact", "starts", "gate_bias", "up_bias"),
            writes=("grad_gate_bias", "grad_up_bias"),
            weights=("gate_bias", "up_bias"),
            optional_reads=("gate_bias", "up_bias"),
            optional_writes=("grad_gate_bias", "grad_up_bias"),
            lists=("gate_bias", "up_bias", "grad_gate_bias", "grad_up_bias"),
        ),
    ),
    # -> pairs [S,H] in pair order, rows of ids out of range are zero;  attrs: gated
    Kernel(
        "grad_pairs",
        "grad_pairs",
        Traits(
            reads=("grad_preact", "perm", "starts", "gate", "up"),
            writes=("pairs",),
            weights=("gate", "up"),
            lists=("gate", "up"),
            tiled=True,
        ),
    ),
    # -> grad_weights [T,k] fp32, <x[t], pairs[p]>;  attrs: k
    Kernel(
        "grad_input_weights",
        "grad_input_weights",
        Traits(reads=("x", "pairs"), writes=("grad_weights",), by_token=("x", "grad_weights")),
    ),
    # The CPU plan: one loop over the experts, everything of an expert hot in cache.
    # -> y [T,H];  attrs: activation, gated, weight_at, dtype
    Kernel(
        "experts_loop",
        "experts",
        Traits(
            reads=("x", "ids", "weights", *_PROJECTIONS, *_BIASES, "perm", "starts"),
            writes=("y",),
            weights=(*_PROJECTIONS, *_BIASES),
            min_arch=None,
            optional_reads=_BIASES,
            lists=(*_PROJECTIONS, *_BIASES),
            by_token=("x", "ids", "weights", "y"),
        ),
    ),
    # -> y [T,H], preact [S,N] in sorted row order;  attrs: activation, gated, weight_at, dtype
    Kernel(
        "experts_loop_saving",
        "experts",
        Traits(
            reads=("x", "ids", "weights", *_PROJECTIONS, *_BIASES, "perm", "starts"),
            writes=("y", "preact"),
            weights=(*_PROJECTIONS, *_BIASES),
            min_arch=None,
            optional_reads=_BIASES,
            lists=(*_PROJECTIONS, *_BIASES),
            by_token=("x", "ids", "weights", "y"),
        ),
    ),
    # -> gradients, empty (or an empty list) where needs is false;  attrs: activation, gated, weight_at, needs
    Kernel(
        "experts_loop_backward",
        "experts",
        Traits(
            reads=("grad_y", "x", "ids", "weights", *_PROJECTIONS, *_BIASES, "preact", "perm", "starts"),
            writes=("grad_x", "grad_weights", *_GRADIENTS),
            weights=(*_PROJECTIONS, *_BIASES),
            min_arch=None,
            optional_reads=("ids", *_BIASES),
            optional_writes=("grad_x", "grad_weights", *_GRADIENTS),
            lists=(*_PROJECTIONS, *_BIASES, *_GRADIENTS),
            by_token=("grad_y", "x", "ids", "weights", "grad_x", "grad_weights"),
        ),
    ),
)


def kernel(name: str) -> Kernel:
    """The kernel called `name`. Raises UnknownKernelError (a KeyError and a ValueError) with the known names."""
    try:
        return _KERNELS[name]
    except KeyError:
        raise UnknownKernelError(f"no kernel is called {name!r}; known kernels: {', '.join(names())}") from None


def tiled() -> tuple[str, ...]:
    """The names of the kernels whose launches take a tile, sorted."""
    return tuple(name for name in names() if _KERNELS[name].traits.tiled)


def names() -> tuple[str, ...]:
    """The names of all kernels, sorted."""
    return tuple(sorted(_KERNELS))
