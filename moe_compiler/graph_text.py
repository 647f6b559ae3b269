"""Writes the graph files that `moe_compiler.graph_file` reads: an fx graph as runnable Python, one line a node."""

from __future__ import annotations

import importlib
import keyword
import math
import operator
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from moe_compiler.graph_file import SIZE_FUNCTIONS
from moe_compiler.moe_ir import user_line

__all__ = ["render_graph", "render_repro"]

# Constants up to this many elements are written with their values.
INLINE_CONSTANT_LIMIT = 64
# Names that a node's variable must not hide: what the file itself uses.
_BODY = "body_"
_OWN_NAMESPACES = frozenset({"aten", "moepdl", "prim", "prims"})
_RESERVED = frozenset({"GraphFile", "float", "g", "graph", "math", "operator", "parent", "slice", "torch"})

_SHOW = """
if __name__ == "__main__":
    graph().print_readable()
"""
_REPRO = """
OPTIONS = {options}

if __name__ == "__main__":
    import sys

    from moe_compiler.backend import last_reports, moepdl
    from moe_compiler.graph_file import example_inputs

    device = sys.argv[1] if len(sys.argv) > 1 else None  # e.g. cpu, where the recorded device is absent
    inputs = example_inputs(graph(), device=device)
    compiled = torch.compile(graph(), backend=moepdl, options=OPTIONS)
    with torch.no_grad():
        for ours, eager in zip(compiled(*inputs), graph()(*inputs), strict=True):
            if isinstance(ours, torch.Tensor) and ours.is_floating_point():
                error = (ours.double() - eager.double()).norm() / eager.double().norm()
                print(f"output {{tuple(ours.shape)}}: differs from eager by {{error:.1e}} of its norm")
    print(last_reports()[-1])
"""


def render_graph(module: GraphModule, title: str, provenance: str = "") -> str:
    """The graph as a Python file. `title` is one line; `provenance` says where it comes from, any number of lines.

    The same graph gives the same text. Bodies of higher-order operators become functions of their own.
    """
    return _Writer().file(module, title, provenance) + _SHOW


def render_repro(module: GraphModule, title: str, provenance: str, options: Mapping[str, Any]) -> str:
    """A graph file which, when run, compiles the graph with `options` on random inputs, and compares with eager."""
    kept = {key: value for key, value in options.items() if key != "dump"}
    return _Writer().file(module, title, provenance) + _REPRO.format(options=repr(kept))


class _Writer:
    """One file: the functions written so far, the modules that targets need, and the sizes seen."""

    def __init__(self) -> None:
        self.functions: list[str] = []
        self.imports: set[str] = set()

    def file(self, module: GraphModule, title: str, provenance: str) -> str:
        self.function(module, "graph", nested=False)
        prose = "\n\n".join(filter(None, [title.strip(), provenance.strip()]))
        prose = prose.replace("\\", "\\\\").replace('"""', "'''")
        if prose.endswith('"'):
            prose += " "
        imports = "\n".join(f"import {name}" for name in sorted({"operator", "torch", *self.imports}))
        lines = [f'"""{prose}\n"""', "# Written by moepdl: `moepdl opt FILE --passes a,b` runs passes on this graph."]
        lines += ["# ruff: noqa", imports, "", "from moe_compiler.graph_file import GraphFile"]
        return "\n".join(lines) + "\n" + "".join(f"\n\n{text}" for text in self.functions)

    def registered(self, name: str) -> None:
        """Have the file import the module that defines the operator `namespace::name` of another library."""
        if name.partition("::")[0] not in _OWN_NAMESPACES:
            module = _defining_module(name)
            if module is not None and module != "__main__":
                self.imports.add(module)

    def function(self, module: GraphModule, name: str, *, nested: bool) -> None:
        """Append the function that rebuilds `module`, then those of the bodies that it needs."""
        place = len(self.functions)
        self.functions.append("")
        body = _Body(self, module, name)
        lines = body.lines()
        signature = f"def {name}(parent: GraphFile) -> torch.fx.GraphModule:" if nested else ""
        head = [
            signature or f"def {name}() -> torch.fx.GraphModule:",
            f"    g = GraphFile({'parent' if nested else ''})",
        ]
        head += [f"    {symbol} = g.size({symbol!r}, {hint})" for symbol, hint in sorted(body.symbols.items())]
        self.functions[place] = "\n".join([*head, *lines, "    return g.finish()"]) + "\n"


class _Body:
    """The statements of one graph."""

    def __init__(self, writer: _Writer, module: GraphModule, name: str) -> None:
        self.writer = writer
        self.module = module
        self.name = name
        self.symbols: dict[str, int | None] = {}
        self.names: dict[Node, str] = {}

    def lines(self) -> list[str]:
        where = ""
        lines = []
        for node in self.module.graph.nodes:
            place = self.place(node)
            # An input's line is where it is first used, which the reader sees there.
            if place != where and node.op not in ("output", "placeholder"):
                lines += ["", f"    g.at({place})"]
                where = place
            lines.append(f"    {self.statement(node)}")
        return lines

    def place(self, node: Node) -> str:
        """The arguments of `g.at`: the user's line and the innermost module."""
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        path = str(stack[-1][0]) if stack and isinstance(stack[-1], tuple) else ""
        return repr(user_line(node)) + (f", {path!r}" if path else "")

    def statement(self, node: Node) -> str:
        if node.op == "output":
            return f"g.output({self.text(node.args[0])})"
        variable = self.variable(node)
        if node.op == "placeholder":
            return f"{variable} = g.placeholder({node.name!r}, {self.value(_result(node))})"
        if node.op == "get_attr":
            return f"{variable} = g.attribute({node.name!r}, {node.target!r}, {self.attribute(str(node.target))})"
        if node.op == "call_module":
            return f"{variable} = g.opaque({f'call of the module {node.target}'!r})"
        target = repr(node.target) if node.op == "call_method" else self.target(node.target)
        parts = [repr(node.name), target, self.text(tuple(node.args))]
        if node.kwargs:
            parts.append(self.text(dict(node.kwargs)))
        if not isinstance(_result(node), (type(None), torch.SymFloat, torch.SymBool)):
            parts.append(f"val={self.value(_result(node))}")
        return f"{variable} = g.{'method' if node.op == 'call_method' else 'call'}({', '.join(parts)})"

    def variable(self, node: Node) -> str:
        """A Python name for the node that hides nothing the file uses."""
        name = re.sub(r"\W", "_", node.name)
        hidden = name in _RESERVED or keyword.iskeyword(name) or name.startswith(_BODY) or not name.isidentifier()
        if hidden or re.fullmatch(r"[suz]\d+", name):
            name += "_node"
        while name in self.names.values():
            name += "_"
        self.names[node] = name
        return name

    def attribute(self, path: str) -> str:
        """What a `get_attr` node reads."""
        try:
            value = operator.attrgetter(path)(self.module)
        except AttributeError:
            return f"g.opaque({f'missing attribute {path}'!r})"
        if isinstance(value, GraphModule):
            function = f"{_BODY}{len(self.writer.functions)}"
            self.writer.function(value, function, nested=True)
            return f"{function}(g)"
        if isinstance(value, torch.Tensor):
            plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.device.type == "cpu"
            if plain and value.numel() <= INLINE_CONSTANT_LIMIT and not value.dtype.is_complex:
                return f"g.constant({_numbers(value.tolist())}, {_dtype(value.dtype)!r})"
            return self.value(value)
        return self.text(value)

    def target(self, target: Any) -> str:
        """The function as an expression that finds it again."""
        if isinstance(target, torch._ops.OpOverload):
            namespace, _, name = target._schema.name.partition("::")
            self.writer.registered(target._schema.name)
            return f"torch.ops.{namespace}.{name}.{target._overloadname}"
        if isinstance(target, torch._ops.OpOverloadPacket):
            namespace, _, name = target._qualified_op_name.partition("::")
            self.writer.registered(target._qualified_op_name)
            return f"torch.ops.{namespace}.{name}"
        if isinstance(target, torch._ops.HigherOrderOperator):
            self.writer.imports.add(type(target).__module__)  # whose import defines it
            return f"torch.ops.higher_order.{target.name()}"
        # A builtin of torch or operator names the extension module it was compiled in; prefer the public one.
        for module in ("operator", "torch", "torch.nn.functional", "math", getattr(target, "__module__", None)):
            for name in (getattr(target, "__name__", ""), getattr(target, "__qualname__", "")):
                if module and name and _finds(module, name, target):
                    self.writer.imports.add(module)
                    return f"{module}.{name}"
        return f"g.opaque({_described(target)!r})"

    def value(self, value: Any) -> str:
        """`meta["val"]`: tensors as `g.tensor(...)`, sizes as names and formulas."""
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        return self.text(value)

    def tensor(self, tensor: torch.Tensor) -> str:
        sizes = list(tensor.shape)
        parts = [repr(_dtype(tensor.dtype)), self.text(tuple(sizes)), repr(str(tensor.device))]
        try:
            strides, offset = list(tensor.stride()), tensor.storage_offset()
        except RuntimeError:  # sparse and nested layouts have no strides
            return f"g.opaque({f'tensor of layout {tensor.layout}'!r})"
        if str(strides) != str(_contiguous(sizes)):
            parts.append(f"strides={self.text(tuple(strides))}")
        if not isinstance(offset, int) or offset:
            if "strides" not in parts[-1]:
                parts.append(f"strides={self.text(tuple(strides))}")
            parts.append(f"offset={self.text(offset)}")
        if tensor.requires_grad:
            parts.append("requires_grad=True")
        return f"g.tensor({', '.join(parts)})"

    def size(self, size: torch.SymInt) -> str:
        expression = size.node.expr
        names = {function.func.__name__ for function in expression.atoms() | set(_subterms(expression))}
        known = {"Add", "Mul", "Pow", "Symbol", "Integer", "One", "Zero", "NegativeOne", *SIZE_FUNCTIONS}
        if not names <= known:
            return f"g.opaque({f'size {expression}'!r})"
        shape_env = size.node.shape_env
        for symbol in expression.free_symbols:
            hint = _hint(shape_env, symbol)
            self.symbols[str(symbol)] = hint
        text = str(expression)
        return text if expression.is_Symbol else f"g.expr({text!r})"

    def text(self, value: Any) -> str:
        """An argument as Python."""
        if isinstance(value, Node):
            return self.names.get(value) or f"g.opaque({f'node {value} before its definition'!r})"
        if isinstance(value, torch.SymInt):
            return self.size(value)
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if value is None or value is Ellipsis or isinstance(value, (bool, int, str, complex)):
            return repr(value)
        if isinstance(value, float):
            return repr(value) if math.isfinite(value) else f'float("{value}")'
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return str(value)
        if isinstance(value, torch.device):
            return f"torch.device({str(value)!r})"
        if isinstance(value, slice):
            return f"slice({self.text(value.start)}, {self.text(value.stop)}, {self.text(value.step)})"
        if isinstance(value, (tuple, torch.Size)):
            items = ", ".join(self.text(item) for item in value)
            return f"({items},)" if len(value) == 1 else f"({items})"
        if isinstance(value, list):
            return f"[{', '.join(self.text(item) for item in value)}]"
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{self.text(key)}: {self.text(item)}" for key, item in value.items()) + "}"
        if callable(value):
            return self.target(value)
        return f"g.opaque({_described(value)!r})"


def _defining_module(name: str) -> str | None:
    """The module whose import defines the operator `namespace::name`, None when torch did not record it."""
    try:
        from torch._library import custom_ops, simple_registry

        definition = custom_ops.OPDEFS.get(name)
        if definition is not None:
            return definition._init_fn.__module__
        kernel = simple_registry.singleton.find(name).fake_impl.kernel
    except (ImportError, AttributeError):
        return None
    file = kernel.source.rpartition(":")[0] if kernel is not None else ""
    modules = [module for module, loaded in list(sys.modules.items()) if getattr(loaded, "__file__", None) == file]
    return min(modules, default=None)


def _result(node: Node) -> Any:
    """What the node computed in the traced run; Dynamo's own graphs keep it under another key."""
    return node.meta.get("val", node.meta.get("example_value"))


def _subterms(expression: Any) -> Iterator[Any]:
    yield expression
    for argument in expression.args:
        yield from _subterms(argument)


def _hint(shape_env: Any, symbol: Any) -> int | None:
    """The value of a symbol in the traced run; None when only data decides it."""
    value = shape_env.create_symintnode(symbol, hint=None)
    return int(value.node.hint) if value.node.has_hint() else None


def _contiguous(sizes: list[Any]) -> list[Any]:
    """The strides of a fresh tensor; dimensions of size 0 and 1 count as torch counts them."""
    strides: list[Any] = [1] * len(sizes)
    for index in range(len(sizes) - 2, -1, -1):
        size = sizes[index + 1]
        strides[index] = strides[index + 1] * (size if isinstance(size, torch.SymInt) else max(size, 1))
    return strides


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _numbers(values: Any) -> str:
    """`tolist()` as Python, with infinities spelled so that they can be read back."""
    if isinstance(values, list):
        return f"[{', '.join(_numbers(value) for value in values)}]"
    return repr(values) if not isinstance(values, float) or math.isfinite(values) else f'float("{values}")'


def _finds(module: str, name: str, target: Any) -> bool:
    """Does `module.name` give `target` back?"""
    try:
        return operator.attrgetter(name)(importlib.import_module(module)) is target
    except (AttributeError, ImportError, ValueError):
        return False


def _described(value: Any) -> str:
    """A name for an object, without the address that its repr may hold: dumps are equal from run to run."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
