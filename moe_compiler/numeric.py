"""`verify="numeric"`: run a graph before and after a pass on the same random inputs and compare every output.

Inputs are shaped by the recorded fake values. A backward graph reads what its forward graph saved (ids, permutations,
offsets), and random numbers are not valid there: it is run on the tensors that the forward graph's own run produced,
matched by name. A backward graph whose forward was not run in this compile (loaded from the cache) is not compared,
and the caller is told.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from moe_compiler import torch_private
from moe_compiler.errors import VerifyError
from moe_compiler.graph_file import example_inputs
from moe_compiler.verify import returned

__all__ = ["NumericCheck", "compare", "copy_graph"]

# One pass may drop roundings: a few units in the last place of a matmul's result, relative to the output's norm.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def copy_graph(module: GraphModule) -> GraphModule:
    """A module with a graph of its own: same names, metadata shared value by value."""
    graph = Graph()
    copied: dict[Node, Node] = {}
    result = graph.graph_copy(module.graph, copied)
    graph.output(result)
    for old, new in copied.items():
        new.meta = dict(old.meta)
    graph.output_node().meta = dict(module.graph.output_node().meta)
    return GraphModule(module, graph)


class NumericCheck:
    """Runs graphs for one compile; keeps what the forward graph saved for the backward one."""

    def __init__(self) -> None:
        self._saved: dict[str, Any] = {}
        self._output_names: list[str] | None = None

    def inputs(self, module: GraphModule, phase: str) -> list[Any] | None:
        """Inputs for a graph, None when they cannot be made (a backward graph without its forward run)."""
        with torch_private.real_tensors():
            made = example_inputs(module)
        if phase == "forward" and self._output_names is None:
            # The backward graph's inputs have the names that the forward's outputs had before any pass.
            self._output_names = [node.name for node in returned(module.graph)]
        if phase != "backward":
            return made
        found = []
        for node, value in zip(module.graph.find_nodes(op="placeholder"), made, strict=True):
            if node.name.startswith("tangents_"):
                found.append(value)
            elif node.name in self._saved:
                found.append(self._saved[node.name])
            elif isinstance(value, torch.Tensor) and not value.dtype.is_floating_point:
                return None
            else:
                found.append(value)
        return found

    def outputs(self, module: GraphModule, inputs: list[Any]) -> list[Any]:
        """The flat outputs of a graph on copies of `inputs`."""
        module.recompile()
        with torch_private.real_tensors(), torch.no_grad():
            copies = [value.detach().clone() if isinstance(value, torch.Tensor) else value for value in inputs]
            result = module(*copies)
        return list(result) if isinstance(result, (tuple, list)) else [result]

    def remember(self, module: GraphModule, inputs: list[Any], outputs: list[Any]) -> None:
        """Keep a forward graph's inputs and outputs under their names, for the backward graph that reads them."""
        tensors = [value for value in outputs if value is not None]
        if self._output_names is not None and len(self._output_names) == len(tensors):
            self._saved.update(zip(self._output_names, tensors, strict=True))
        for node, value in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
            self._saved[node.name] = value


def compare(name: str, before: list[Any], after: list[Any]) -> None:
    """Raise VerifyError when an output of pass `name` differs by more than rounding."""
    with torch_private.real_tensors():
        _compare(name, before, after)


def _compare(name: str, before: list[Any], after: list[Any]) -> None:
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        if not isinstance(old, torch.Tensor) or not old.numel():
            continue
        if not old.dtype.is_floating_point:
            if not torch.equal(old, new):
                raise VerifyError(f"pass {name}: output {index} differs", check="numeric", try_=_try(name))
            continue
        error = (old.double() - new.double()).norm()
        scale = old.double().norm() + 1e-30
        if not bool(error <= _TOLERANCE[old.dtype] * scale):
            raise VerifyError(
                f"pass {name}: output {index} differs by {float(error / scale):.2e} of its norm",
                check="numeric",
                why=f"rounding explains at most {_TOLERANCE[old.dtype]:.0e} for {old.dtype}",
                try_=_try(name),
            )


def _try(name: str) -> str:
    return f'options={{"disable": ["{name}"]}}, and a bug report with the dump folder'
