"""Regions of torch.func transforms (vmap, grad, jvp): one leaf each while the rest of the graph is searched.

Dynamo records a transform as calls that enter it, the operators of its body, and calls that leave it. Between them
tensors are wrapped, and only autograd's own machinery, which Inductor runs, can unwrap them into one ATen graph. So
nothing inside moves: `outline` makes each outermost region one call of `transform_region` with what Dynamo wrote as its
body, and `restore` writes it back, node by node, before Inductor gets the graph.

A region is a leaf only when nothing of it reaches the outside but tensors and sizes that are its results: `run` refuses
wrapped values that are used behind it, writes into the tensors that it reads, and results that share memory with them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils._pytree import tree_leaves

from moe_compiler import torch_private
from moe_compiler.errors import CaptureError
from moe_compiler.moe_ir import user_line

__all__ = ["TRANSFORM_REGION", "outline", "restore", "run"]


class _TransformRegion(torch._ops.HigherOrderOperator):
    """transform_region(body, *operands) -> the body's results, a tuple."""

    def __init__(self) -> None:
        super().__init__("transform_region")

    def __call__(self, body: Any, *operands: Any) -> Any:
        return body(*operands)


TRANSFORM_REGION = _TransformRegion()


def outline(module: GraphModule) -> GraphModule:
    """`module` with each region as one call; `module` itself when it has none. It is left as it is.

    Raises CaptureError when a transform is entered and not left in this graph, or reads an attribute of the module.
    """
    regions = list(_regions(module.graph))
    if not regions:
        return module
    bodies: dict[str, GraphModule] = {}
    graph, copied = Graph(), dict[Node, Node]()
    firsts = {region[0]: region for region in regions}
    inside = {node for region in regions for node in region}
    for node in module.graph.nodes:
        if node in firsts:
            body, operands, results = _body(module, firsts[node])
            name = f"transform_region_{len(bodies)}"
            bodies[name] = body
            call = graph.create_node(
                "call_function",
                TRANSFORM_REGION,
                (graph.get_attr(name), *(copied[operand] for operand in operands)),
            )
            for key in ("stack_trace", "nn_module_stack"):
                found = next((own.meta[key] for own in firsts[node] if own.meta.get(key)), None)
                if found is not None:
                    call.meta[key] = found
            for index, result in enumerate(results):
                copied[result] = graph.call_function(operator.getitem, (call, index))
        elif node not in inside:
            copied[node] = graph.node_copy(node, lambda n: copied[n])
    outlined = GraphModule({**_attributes(module), **bodies}, graph)
    outlined.meta.update(module.meta)
    return outlined


def restore(module: GraphModule) -> None:
    """Write the regions of a captured graph back as Dynamo recorded them, in place."""
    found = module.graph.find_nodes(op="call_function", target=TRANSFORM_REGION)
    for call in found:
        attribute, *operands = call.args
        body = getattr(module, str(attribute.target))  # type: ignore[union-attr]
        environment: dict[Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))
        with module.graph.inserting_before(call):
            for node in body.graph.nodes:
                if node.op not in ("placeholder", "output"):
                    environment[node] = module.graph.node_copy(node, environment.__getitem__)
        (results,) = body.graph.output_node().args
        for item in list(call.users):
            item.replace_all_uses_with(environment[results[item.args[1]]])  # type: ignore[index]
            module.graph.erase_node(item)
        module.graph.erase_node(call)
        if not attribute.users:  # type: ignore[union-attr]
            module.graph.erase_node(attribute)  # type: ignore[arg-type]
            delattr(module, str(attribute.target))  # type: ignore[union-attr]
    if found:
        module.recompile()


def run(body: GraphModule, operands: Sequence[Any], where: str) -> Any:
    """The results of a region on fake operands, below a trace.

    `where` is the user's line, for messages. Raises CaptureError when the region has an effect or a result that a call
    of it would hide; the transforms that were entered are left then, too.
    """
    interpreter, writes = _Steps(body), _Writes()
    try:
        with writes:
            results = interpreter.run(*operands)
    except BaseException:
        interpreter.leave()
        raise
    reasons = {
        "a value inside of the transform is used behind it": any(map(_is_wrapped, results)),
        "it writes into a tensor that it is given": bool(writes.written & _storages(operands)),
        "a result shares its memory with another tensor": _shares(operands, results),
    }
    for why, holds in reasons.items():
        if holds:
            raise _refused(why, where)
    return results


def _refused(why: str, where: str) -> CaptureError:
    return CaptureError(
        what="a torch.func transform (grad, vmap, jvp or one of their like) cannot be set apart from its graph",
        why=why,
        try_="compile the part with the experts by itself",
        where=where,
    )


# Where regions are


def _regions(graph: Graph) -> Iterator[list[Node]]:
    """The nodes of each outermost region, from the call that enters it to the call that leaves it."""
    nodes, position = list(graph.nodes), 0
    while position < len(nodes):
        node = nodes[position]
        if not torch_private.is_transform_call(node.target):
            position += 1
            continue
        if torch_private.transform_step(node.target) == 0:
            raise _refused(f"{node.name} stands outside of any transform of this graph", user_line(node))
        first, depth = position, 0
        while position < len(nodes):
            depth += torch_private.transform_step(nodes[position].target)
            position += 1
            if depth <= 0:
                break
        if depth != 0:
            raise _refused("it is not entered and left in the same graph", _line(nodes[first:position]))
        # What grad and its like forbid around themselves belongs to them; the output node is behind every region.
        around = (nodes[first - 1].target if first else None, nodes[position].target)
        if [torch_private.hooks_step(target) for target in around] == [1, -1]:
            first, position = first - 1, position + 1
        yield nodes[first:position]


def _body(module: GraphModule, region: Sequence[Node]) -> tuple[GraphModule, list[Node], list[Node]]:
    """(body, operands, results) of a region."""
    inside = set(region)
    graph, copied = Graph(), dict[Node, Node]()
    operands = list(dict.fromkeys(n for node in region for n in node.all_input_nodes if n not in inside))
    for operand in operands:
        copied[operand] = graph.placeholder(operand.name)
    for node in region:
        if node.op not in ("call_function", "call_method"):
            raise _refused(f"it reads {node.target!r}, an attribute of the model", user_line(node))
        copied[node] = graph.node_copy(node, lambda n: copied[n])
    results = [node for node in region if any(user not in inside for user in node.users)]
    graph.output(tuple(copied[node] for node in results))
    return GraphModule({}, graph), operands, results


def _attributes(module: GraphModule) -> dict[str, Any]:
    """What the graph's nodes read of their module, by path."""
    paths = [str(node.target) for node in module.graph.nodes if node.op in ("get_attr", "call_module")]
    return {path: operator.attrgetter(path)(module) for path in paths}


def _line(region: Sequence[Node]) -> str:
    """The user's line of a region: the first that one of its nodes has."""
    return next((line for node in region if (line := user_line(node))), "")


# What a region does


class _Steps(Interpreter):
    """Runs a body and knows how far it came."""

    def __init__(self, body: GraphModule) -> None:
        super().__init__(body)
        self._nodes = list(body.graph.nodes)
        self._ran = 0

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        self._ran += 1
        return result

    def leave(self) -> None:
        """After a failure: the calls further down that leave, or switch back, what was entered and switched."""
        entered = 0
        for node in self._nodes[self._ran :]:
            step = torch_private.transform_step(node.target) or torch_private.hooks_step(node.target)
            if step > 0 or (step < 0 and entered):
                entered += step
            elif not entered and (step < 0 or torch_private.is_transform_switch(node.target)):
                node.target(*node.args, **node.kwargs)  # type: ignore[operator]


class _Writes(torch_private.dispatch_mode_base()):  # type: ignore[misc]
    """Keeps which memory is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for position, argument in enumerate(func._schema.arguments if func._schema.is_mutable else ()):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.written |= _storages(args[position] if position < len(args) else kwargs.get(argument.name))
        return func(*args, **kwargs)


def _is_wrapped(value: Any) -> bool:
    """Is it anything else than a plain tensor or a size?"""
    if isinstance(value, torch.Tensor):
        return torch_private.is_wrapped_by_transform(value)
    return not isinstance(value, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool, type(None)))


def _storages(values: Any) -> set[int]:
    """The memory of all tensors in a nest of values, by address; none of those that are wrapped."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
    return {value.untyped_storage()._cdata for value in tensors if not torch_private.is_wrapped_by_transform(value)}


def _shares(operands: Sequence[Any], results: Sequence[Any]) -> bool:
    """Does a result have its memory in common with an operand or another result?"""
    known = _storages(operands)
    for result in results:
        own = _storages(result)
        if own & known:
            return True
        known |= own
    return False
