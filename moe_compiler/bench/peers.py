"""What a peer gets and gives.

A peer is a function `peer_NAME(block)` in a Python file: it gets a `PeerBlock` and returns a function of x [T, H] that
returns the block's output y [T, H], shared expert included, or None where it has nothing to offer for this block. It is
called once for each number of tokens and each direction. What it returns is called often, and captured in a CUDA graph:
x is always one of `block.inputs`. In direction "forward_backward" the output must be differentiable with respect to x
and to the block's own parameters.

What a peer leaves outside its timed calls it takes from `block.prepared` or `block.routing`, and the results say so.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_compiler.bench.block import Block
from moe_compiler.bench.results import FORWARD
from moe_compiler.bench.shapes import Shape
from moe_compiler.errors import UsageError

__all__ = ["PeerBlock", "load_peers"]

PREFIX = "peer_"
Call = Callable[[Tensor], Tensor]


class PeerBlock:
    """One block, as a peer gets it; all tensors are the block's own and must not be changed.

    shape      its sizes and rules (`moe_compiler.bench.shapes.Shape`)
    module     the block itself: module(x) is eager's output, module.activate(h) its activation, [N, 2I] -> [N, I]
    router     the router: router(x) gives (weights [T, k], ids [T, k]); router.weight [E, H]
    gate_up    [E, 2I, H]; down [E, H, I]; with the last two dimensions turned when shape.transposed
    gate_up_bias, down_bias    [E, 2I] and [E, H], or None
    shared     the shared expert, shared(x) [T, H], or None
    inputs     all x that will come; tokens: T; direction: "forward" or "forward_backward"
    """

    def __init__(self, block: Block, inputs: Sequence[Tensor], direction: str) -> None:
        self.shape: Shape = block.shape
        self.module: Block = block
        self.router: nn.Module = block.router
        self.gate_up, self.down = block.gate_up, block.down
        self.gate_up_bias, self.down_bias = block.gate_up_bias, block.down_bias
        self.shared: nn.Module | None = block.shared
        self.inputs = list(inputs)
        self.tokens = inputs[0].shape[0]
        self.direction = direction
        self.outside: set[str] = set()
        self.routed: list[tuple[Tensor, Tensor]] = []  # what `routing` gave out
        self._kept: dict[tuple[Any, int], Any] = {}
        self._sealed = False

    def prepared(self, x: Tensor, make: Callable[[Tensor], Any]) -> Any:
        """`make(x)`, computed once for each of `inputs`, without gradients and outside the timed calls.

        Raises ValueError for an x that is none of `inputs`, and for a function that only a timed call brings.
        """
        index = next((i for i, own in enumerate(self.inputs) if own is x), None)
        if index is None:
            raise ValueError("prepared() takes x as it came, one of block.inputs: anything else would not be timed")
        key = (make, index)
        if key not in self._kept:
            if self._sealed:
                raise ValueError("prepared() got another function than in the call before: define it once, outside")
            self.outside.add(getattr(make, "__name__", str(make)).strip("_"))
            with torch.no_grad():
                self._kept[key] = make(x)
        return self._kept[key]

    def seal(self) -> None:
        """From now on calls are timed: what was not prepared by then never will be."""
        self._sealed = True

    def routing(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(weights [T, k], ids [T, k]) of the block's own router, outside the timed calls.

        In direction "forward_backward" the weights are a leaf that requires a gradient.
        """
        weights, ids = self.prepared(x, self._router)
        return weights, ids

    def _router(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = self.router(x)
        self.routed.append((weights.detach().requires_grad_(self.direction != FORWARD), ids))
        return self.routed[-1]


Peer = Callable[[PeerBlock], "Call | None"]


def load_peers(files: Sequence[Path], taken: Sequence[str] = ()) -> dict[str, Peer]:
    """The peers of some files, by name. Raises UsageError for a file without any, and for a name that is `taken`."""
    found: dict[str, Peer] = {}
    for file in files:
        if not file.is_file():
            raise UsageError(f"there is no file {file}", try_="--peers FILE.py, a file with functions peer_NAME(block)")
        spec = importlib.util.spec_from_file_location(f"moepdl_peers_{file.stem}", file)
        if spec is None or spec.loader is None:
            raise UsageError(f"{file} is no Python file", try_="a name that ends in .py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses and triton look a function's module up there
        spec.loader.exec_module(module)
        own = {
            name.removeprefix(PREFIX): value
            for name, value in vars(module).items()
            if name.startswith(PREFIX) and callable(value)
        }
        if not own:
            raise UsageError(f"{file} defines no peer", try_="def peer_mine(block): return lambda x: block.module(x)")
        for name in own:
            if name in found or name in taken:
                raise UsageError(f"{file}: there are two ways named {name!r}", try_=f"another name for peer_{name}")
        found |= own
    return found
