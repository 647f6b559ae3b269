"""For tests of passes and formulations: capture a model, run some passes, compare graphs.

    module = capture_graph(model, x)                               # what the passes get to see
    after, report = run_passes(module, ["canonicalize", "find_moe", "raise_moe"])
    assert_same_graph(after, expected)                             # `expected`: a graph, or a function of its inputs

Graphs are compared by what they compute and return: names of nodes, the order of independent operators, spelled-out
default arguments and dead code do not matter; the order of reads and writes of the same memory does.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from moe_compiler import device, pipeline, torch_private
from moe_compiler.aliasing import alias_root, has_effect, mutated_arguments
from moe_compiler.capture import capture
from moe_compiler.errors import CaptureError
from moe_compiler.graph_pass import Context, GraphPass, fake_mode_of_graph
from moe_compiler.moe_ir import size_expr
from moe_compiler.numeric import copy_graph
from moe_compiler.options import resolve
from moe_compiler.passes.formulations.base import Example
from moe_compiler.passes.formulations.registry import EXCHANGES, FORMULATIONS
from moe_compiler.report import Report

__all__ = [
    "Example",
    "assert_same_graph",
    "canonical_text",
    "capture_graph",
    "examples",
    "exchange_examples",
    "run_passes",
]


def examples() -> dict[str, Callable[..., Example]]:
    """The example of every registered formulation, by its name.

    Each value is called as `example(dtype, experts, top_k, hidden, intermediate)`, all optional, and gives an
    `Example`: a module, `inputs(tokens)` that makes its arguments, and how many blocks a compile finds in it.
    """
    return {formulation.name: formulation.example for formulation in FORMULATIONS}


def exchange_examples() -> dict[str, Callable[..., Example]]:
    """As `examples`, of the formulations whose experts are on several ranks.

    Each module is made for the default process group, so torch.distributed has to be initialised.
    """
    return {formulation.name: formulation.example for formulation in EXCHANGES}


def capture_graph(model: Callable[..., Any], *inputs: Any, dynamic: bool | None = None) -> GraphModule:
    """The graph that the passes of phase "capture" get for `model(*inputs)`, traced as the backend traces it.

    The model is called once, eagerly. Its parameters and buffers are inputs of the graph. `dynamic` is that of
    torch.compile: True makes sizes symbolic, None leaves them as they are. Raises torch's own error when the model does
    not give one whole graph (`fullgraph=True`), and CaptureError when its graph cannot be retraced, or when it has no
    tensor operator at all.
    """
    captured: list[GraphModule] = []

    def backend(module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        captured.append(capture(module, example_inputs))
        return module.forward

    # Each call brings a new backend, so code that was captured before is compiled again, however often; and sizes that
    # differ from those of an earlier call do not become symbolic by themselves.
    settings = {"recompile_limit": 1 << 20, "accumulated_recompile_limit": 1 << 20, "automatic_dynamic_shapes": False}
    with torch._dynamo.config.patch(settings):
        torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=True)(*inputs)
    if not captured:
        raise CaptureError(
            what="nothing was captured",
            why="the model runs no tensor operator, or is already compiled",
            try_="hand over the model itself, not what torch.compile returned, and inputs that it computes with",
        )
    return captured[-1]


def run_passes(
    target: Callable[..., Any],
    passes: Iterable[str | GraphPass],
    *inputs: Any,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
) -> tuple[GraphModule, Report]:
    """Run passes in the order given -> (the graph they leave, the report with their records, matches and misses).

    target: a GraphModule, which is copied and left as it is, or a model (any callable), which is captured with
    `capture_graph(target, *inputs, dynamic=dynamic)` first. passes: names, or passes that are in no pipeline. They
    share one Context and are checked after each as in a compile. options: as in torch.compile.

    Raises KeyError for an unknown name, OptionError, and PassError when a pass breaks an invariant.
    """
    if isinstance(target, GraphModule) and not inputs:
        module = copy_graph(target)
    else:
        module = capture_graph(target, *inputs, dynamic=dynamic)
    chosen = tuple(pipeline.pass_named(item) if isinstance(item, str) else item for item in passes)
    after_autograd = {graph_pass.name for phase, graph_pass in pipeline.PIPELINE if phase == "graph"}
    phase = "forward" if chosen and chosen[0].name in after_autograd else "capture"
    settings = resolve(options, known_names=pipeline.known_names())
    report = Report(
        frame="test",
        status="unchanged",
        options=settings.to_dict(),
        origins=dict(settings.origins),
        environment=device.describe(),
    )
    if pipeline.run_passes(module, chosen, Context(settings, phase, report)):
        report.status = "rewritten"
        module.recompile()
    return module, report


def assert_same_graph(actual: Graph | GraphModule, expected: Graph | GraphModule | Callable[..., Any]) -> None:
    """Raise AssertionError, with a unified diff of the canonical texts, unless both graphs compute the same.

    expected: a graph, or a Python function of the inputs of `actual` in their order (a captured graph has parameters,
    tensors and symbolic sizes as inputs, in the order of their first use), which is traced on the fake values of these
    inputs. It may call `torch.ops.moepdl` operators.
    """
    graph = _graph(actual)
    if isinstance(expected, (Graph, GraphModule)):
        wanted = _graph(expected)
    else:
        values = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
        mode = fake_mode_of_graph(graph)
        if mode is None:
            raise ValueError("the graph holds no fake tensors to trace the expected function with")
        wanted = torch_private.make_fx_pre_dispatch(lambda *inputs: expected(*inputs), mode, values).graph
    before, after = (canonical_text(item).splitlines(keepends=True) for item in (wanted, graph))
    if before != after:
        diff = difflib.unified_diff(before, after, "expected", "actual", n=4)
        raise AssertionError("the graphs differ:\n" + "".join(diff))


def canonical_text(graph: Graph | GraphModule) -> str:
    """A text that is equal for graphs which compute the same with the same operators.

    One line an operator, in the order in which outputs need them; numbers in place of names; arguments by their schema
    names without those at their defaults; symbolic sizes renamed in order of appearance.
    """
    return "\n".join(_Text(_graph(graph)).lines()) + "\n"


def _graph(value: Graph | GraphModule) -> Graph:
    return value.graph if isinstance(value, GraphModule) else value


class _Text:
    """Writes one graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.names: dict[Node, str] = {}
        self.symbols: dict[Any, str] = {}
        self.written: list[str] = []
        order = {node: index for index, node in enumerate(graph.nodes)}
        writes: dict[Node, list[int]] = {}
        for node in graph.nodes:
            for argument in mutated_arguments(node):
                writes.setdefault(alias_root(argument), []).append(order[node])
        self.order, self.writes = order, writes

    def lines(self) -> list[str]:
        for index, node in enumerate(self.graph.find_nodes(op="placeholder")):
            self.names[node] = f"in{index}"
            self.written.append(f"in{index}: {self.type(node.meta.get('val'))}")
        for node in self.graph.nodes:
            if node.op not in ("placeholder", "output") and has_effect(node):
                self.visit(node)
        output = self.graph.output_node()
        self.visit_all(output.all_input_nodes)
        self.written.append(f"return {self.value(_flat(output.args[0]))}")
        return self.written

    def visit_all(self, nodes: list[Node]) -> None:
        # An explicit stack: graphs are deeper than Python's recursion goes.
        pending = list(reversed(nodes))
        while pending:
            node = pending[-1]
            missing = [source for source in node.all_input_nodes if source not in self.names]
            if node in self.names or not missing:
                pending.pop()
                if node not in self.names:
                    self.write(node)
            else:
                pending.extend(reversed(missing))

    def visit(self, node: Node) -> None:
        self.visit_all([node])

    def write(self, node: Node) -> None:
        name = self.names[node] = f"%{len(self.names)}"
        if node.op == "get_attr":
            self.written.append(f"{name} = {self.attribute(node)}")
            return
        after = [self.writes_before(node, source) for source in node.all_input_nodes]
        note = f"  # after {sum(after)} writes" if any(after) else ""
        kind = self.type(node.meta.get("val"))
        self.written.append(f"{name}: {kind} = {_target(node)}({self.arguments(node)}){note}")

    def writes_before(self, node: Node, source: Node) -> int:
        """How many in-place operators changed the memory of an operand since it was made and before it is read."""
        return sum(self.order[source] < write < self.order[node] for write in self.writes.get(alias_root(source), ()))

    def attribute(self, node: Node) -> str:
        value: Any = self.graph.owning_module
        for part in str(node.target).split("."):
            value = getattr(value, part, None)
        if isinstance(value, GraphModule):
            body = "".join(f"\n    {line}" for line in _Text(value.graph).lines())
            return f"body:{body}"
        return self.type(value) if isinstance(value, torch.Tensor) else str(node.target)

    def arguments(self, node: Node) -> str:
        schema = getattr(node.target, "_schema", None)
        if schema is None or len(node.args) > len(schema.arguments):
            parts = [self.value(item) for item in node.args]
            return ", ".join(parts + [f"{key}={self.value(item)}" for key, item in sorted(node.kwargs.items())])
        given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | dict(node.kwargs)
        parts = []
        for argument in schema.arguments:
            if argument.name not in given:
                continue
            value = given[argument.name]
            # pin_memory=False is what every trace writes out, and what leaving it out means.
            usual = argument.has_default_value() and not isinstance(value, Node) and value == argument.default_value
            if not usual and (argument.name, value) != ("pin_memory", False):
                parts.append(f"{argument.name}={self.value(value)}")
        return ", ".join(parts)

    def value(self, value: Any) -> str:
        if isinstance(value, Node):
            return self.names[value]
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self.value(item) for item in value)}]"
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{key}: {self.value(item)}" for key, item in sorted(value.items())) + "}"
        if isinstance(value, torch.SymInt):
            return self.size(value)
        return str(value) if not callable(value) else getattr(value, "__name__", str(value))

    def size(self, size: Any) -> str:
        expression = size_expr(size)
        for symbol in sorted(expression.free_symbols, key=str):
            self.symbols.setdefault(symbol, f"n{len(self.symbols)}")
        return str(expression.subs(dict(self.symbols)))

    def type(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            return f"{dtype}[{', '.join(self.size(size) for size in value.shape)}]"
        if isinstance(value, (list, tuple)):
            return f"({', '.join(self.type(item) for item in value)})"
        return "size" if isinstance(value, (int, torch.SymInt)) else type(value).__name__


def _target(node: Node) -> str:
    return str(node.target) if hasattr(node.target, "_schema") else getattr(node.target, "__name__", str(node.target))


def _flat(value: Any) -> list[Any]:
    """The outputs of a graph as a list: one tensor and a tuple of one are the same result."""
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _flat(item)]
    return [value]
