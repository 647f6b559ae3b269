"""Graphs as Python files: `render_graph` writes one, `load_graph` reads it back, `GraphFile` is what such a file calls.

A file shows what a pass left behind, one line a node, and is more than a picture: it rebuilds the same fx graph with
node names, targets, arguments, the user's line of each node and fake tensors (or symbolic sizes) in `meta["val"]`, so a
pass can run on it again. Files of consecutive passes differ in the lines that the pass changed, and in no other.

What a file cannot hold: values of large constants (their shape stays), objects without a Python spelling (loading such
a file fails and names the object), and `meta` entries that no pass reads.
"""

from __future__ import annotations

import hashlib
import importlib.util
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from moe_compiler.errors import MoepdlError

__all__ = ["GraphFile", "example_inputs", "load_graph"]


def _max(*sizes: Any) -> Any:
    largest = sizes[0]
    for size in sizes[1:]:
        largest = torch.sym_max(largest, size)
    return largest


def _min(*sizes: Any) -> Any:
    smallest = sizes[0]
    for size in sizes[1:]:
        smallest = torch.sym_min(smallest, size)
    return smallest


# Functions that the text of a symbolic size may call.
SIZE_FUNCTIONS: dict[str, Any] = {
    "Max": _max,
    "Min": _min,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "CeilDiv": lambda size, by: -(-size // by),
}


class GraphFile:
    """Builds one fx graph; its methods are the statements of a graph file.

    `parent` is the graph that holds this one as the body of a higher-order operator: they share the fake mode and the
    symbolic sizes.
    """

    def __init__(self, parent: GraphFile | None = None) -> None:
        from torch._subclasses import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        import moe_compiler.runtime_kernels.register  # noqa: F401 - the file is about to name torch.ops.moepdl operators

        self.mode: Any = (
            FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True) if parent is None else parent.mode
        )
        self.sizes: dict[str, Any] = {} if parent is None else parent.sizes
        self.root = torch.nn.Module()
        self.fx_graph = Graph()
        self.where = ""
        self.module_path = ""

    def size(self, name: str, hint: int | None) -> Any:
        """The symbolic size `name`; `hint` was its value in the traced run, None for a size that only data decides."""
        if name not in self.sizes:
            self.sizes[name] = _new_symbol(self.mode.shape_env, name, hint)
        return self.sizes[name]

    def expr(self, text: str) -> Any:
        """A size that is a formula of other sizes, in sympy's spelling."""
        return eval(text, {"__builtins__": {}}, {**SIZE_FUNCTIONS, **self.sizes})

    def tensor(
        self,
        dtype: str,
        sizes: Sequence[Any],
        device: str = "cpu",
        *,
        strides: Sequence[Any] | None = None,
        offset: Any = 0,
        requires_grad: bool = False,
    ) -> torch.Tensor:
        """A fake tensor; contiguous where no strides are given."""
        options: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": device}
        with self.mode:
            if strides is None and not requires_grad:
                tensor = torch.empty(tuple(sizes), **options)
            elif strides is None:
                tensor = torch.empty(tuple(sizes), **options).requires_grad_()
            else:
                tensor = torch.empty_strided(tuple(sizes), tuple(strides), **options)
                if offset:
                    whole = torch.empty((_extent(sizes, strides, offset),), **options)
                    tensor = whole.as_strided(tuple(sizes), tuple(strides), offset)
                if requires_grad:
                    tensor.requires_grad_()
        return tensor

    def constant(self, values: Any, dtype: str) -> torch.Tensor:
        """A real tensor: a constant small enough to be written with its values."""
        return torch.tensor(values, dtype=getattr(torch, dtype))

    def opaque(self, text: str) -> Any:
        """Stands where the graph holds an object that has no Python spelling."""
        raise MoepdlError(
            f"this graph file holds an object that cannot be rebuilt: {text}",
            why="only operators, importable functions, plain values, sizes and tensors have a spelling in a file",
            try_="read the file as text, or run the pass on the model itself",
            where=self.where,
        )

    def at(self, where: str, module: str = "") -> None:
        """The user's line (`file:line: code`) and the module path of the nodes that follow."""
        self.where, self.module_path = where, module

    def placeholder(self, name: str, val: Any = None) -> Node:
        """An input of the graph."""
        return self._finish(self.fx_graph.placeholder(name), name, val)

    def attribute(self, name: str, path: str, value: Any) -> Node:
        """A `get_attr` node; `value` (a tensor or a GraphModule) is put at `path` of the graph's module."""
        *folders, last = path.split(".")
        owner = self.root
        for folder in folders:
            if not hasattr(owner, folder):
                owner.add_module(folder, torch.nn.Module())
            owner = getattr(owner, folder)
        setattr(owner, last, value)
        node = self.fx_graph.create_node("get_attr", path, name=name)
        return self._finish(node, name, value if isinstance(value, torch.Tensor) else None)

    def call(
        self,
        name: str,
        target: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        val: Any = None,
    ) -> Node:
        """A call of a function; `val` is its result as the traced run described it."""
        node = self.fx_graph.create_node("call_function", target, tuple(args), dict(kwargs or {}), name=name)
        return self._finish(node, name, self._computed(node, val))

    def method(
        self,
        name: str,
        target: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        val: Any = None,
    ) -> Node:
        """A call of a method of the first argument."""
        return self._finish(
            self.fx_graph.create_node("call_method", target, tuple(args), dict(kwargs or {}), name=name), name, val
        )

    def output(self, value: Any) -> None:
        """What the graph returns."""
        self.fx_graph.output(value)

    def finish(self) -> GraphModule:
        """The module of the graph, checked by fx."""
        self.fx_graph.lint()
        return GraphModule(self.root, self.fx_graph)

    def _finish(self, node: Node, name: str, val: Any) -> Node:
        # fx may have chosen another name than the one asked for, e.g. where it is a keyword of Python.
        node.name = name
        if val is not None:
            node.meta["val"] = val
        if self.where:
            place, _, code = self.where.partition(": ")
            path, _, line = place.rpartition(":")
            node.meta["stack_trace"] = f'  File "{path}", line {line}, in forward\n    {code}\n'
        if self.module_path:
            node.meta["nn_module_stack"] = {self.module_path: (self.module_path, "")}
        return node

    def _computed(self, node: Node, recorded: Any) -> Any:
        """The result by running the operator on fake arguments, where that gives what was recorded; else the record.

        A recorded tensor has a storage of its own, a computed view shares its base's, and passes order by storage.
        """
        target: Any = node.target
        if not _is_pure(target):
            return recorded
        try:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), _value_of)
            with self.mode:
                computed = target(*args, **kwargs)
        except Exception:
            return recorded
        # Symbolic floats and bools have no spelling in a file: they are only ever computed.
        return computed if recorded is None or _same(computed, recorded) else recorded


def _is_pure(target: Any) -> bool:
    """May the target be run while loading? Functions that switch autograd's or autocast's state may not."""
    if isinstance(target, torch._ops.OpOverload):
        return True
    return getattr(target, "__module__", "") == "_operator" or getattr(target, "__name__", "").startswith("sym_")


def _value_of(node: Node) -> Any:
    return node.meta["val"]


def _same(left: Any, right: Any) -> bool:
    """Do two results describe the same tensors and sizes?"""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return _description(left) == _description(right)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(_same, left, right))
    return type(left) is type(right) and str(left) == str(right)


def _description(tensor: torch.Tensor) -> tuple[str, ...]:
    return (
        str(tuple(tensor.shape)),
        str(tensor.stride()),
        str(tensor.storage_offset()),
        str(tensor.dtype),
        str(tensor.device),
        str(tensor.requires_grad),
    )


def _extent(sizes: Sequence[Any], strides: Sequence[Any], offset: Any) -> Any:
    """How many elements a storage must hold for a tensor of these sizes, strides and offset."""
    return offset + 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def _new_symbol(shape_env: Any, name: str, hint: int | None) -> Any:
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    if hint is None:
        return shape_env.create_unbacked_symint()
    # torch numbers a symbol by a hash of its source's name. Ask with a source that gives the number of the file, so
    # that texts of the reloaded graph compare equal; where torch numbers otherwise, the names differ and nothing else.
    wanted = int(name[1:]) if name[1:].isdecimal() else -1
    sources = (f"{name}.{attempt}" for attempt in range(2000))
    source = next((text for text in sources if _number_of(text) == wanted), name)
    symbol = shape_env.create_symbol(
        hint, source=ConstantSource(source), dynamic_dim=DimDynamic.DYNAMIC, do_not_specialize_zero_one=True
    )
    return shape_env.create_symintnode(symbol, hint=hint, source=ConstantSource(source))


def _number_of(source: str) -> int:
    return int(hashlib.sha256(source.encode()).hexdigest(), 16) % 100


def load_graph(path: str | Path) -> GraphModule:
    """The graph that a file written by `render_graph` describes; runs the file.

    Raises MoepdlError when the file is missing, does not run, or is no graph file.
    """
    path = Path(path)
    if not path.is_file():
        raise MoepdlError(f"there is no graph file {path}", try_="a numbered .py file of a dump folder")
    name = "moepdl_graph_" + hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise MoepdlError(f"{path} is not a Python file", try_="a numbered .py file of a dump folder")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        build = getattr(module, "graph", None)
        graph = build() if callable(build) else None
    except MoepdlError:
        raise
    except Exception as error:
        raise MoepdlError(
            f"{path} does not rebuild its graph: {type(error).__name__}: {error}",
            why="it was edited, it was written by another version of moepdl or torch, or an operator is not defined",
            try_="write the dump again with this version, or import the library that defines the operator in the file",
        ) from error
    if not isinstance(graph, GraphModule):
        raise MoepdlError(f"{path} has no function graph() that returns a GraphModule", try_="a file of a dump folder")
    return graph


def example_inputs(module: GraphModule, *, device: str | None = None, seed: int = 0) -> list[Any]:
    """Random inputs shaped as the placeholders' `meta["val"]`; symbolic sizes take their hints.

    Floating tensors are standard normal, integers are zeros (a valid index everywhere), booleans are True. `device`
    replaces the recorded one. Strides are kept.
    """
    generator = torch.Generator().manual_seed(seed)
    return [
        _realise(node.meta.get("val"), device, generator) for node in module.graph.nodes if node.op == "placeholder"
    ]


def hint_of(size: Any) -> int:
    """The plain int behind a size; a size that only data decides counts as 2."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    return int(size.node.hint) if size.node.has_hint() else 2


def _realise(value: Any, device: str | None, generator: torch.Generator) -> Any:
    if isinstance(value, torch.SymInt):
        return hint_of(value)
    if not isinstance(value, torch.Tensor):
        return value
    sizes = [hint_of(size) for size in value.shape]
    strides = [hint_of(stride) for stride in value.stride()]
    tensor = torch.empty_strided(sizes, strides, dtype=value.dtype, device="cpu")
    if value.dtype.is_floating_point or value.dtype.is_complex:
        tensor.copy_(torch.randn(sizes, generator=generator))
    else:
        tensor.fill_(1 if value.dtype is torch.bool else 0)
    moved = torch.empty_strided(sizes, strides, dtype=value.dtype, device=device or value.device).copy_(tensor)
    return moved.requires_grad_(value.requires_grad)
