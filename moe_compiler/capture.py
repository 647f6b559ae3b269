"""Capture: Dynamo's graph retraced once to pre-dispatch ATen, one dialect in which every formulation can be matched.

What moves: torch functions, methods and composite operators become ATen overloads; autograd, autocast and the grad
mode stay ahead (pre-dispatch), so the canonical operators that are raised here are differentiated later. What stays:
placeholders with everything that makes Inductor treat parameters as static, the module's metadata, higher-order
operators (activation checkpoint, a user's autograd function, cond, flex attention) as leaves with their recorded
metadata, user stack traces. The body of an activation checkpoint is captured too; `unsearched` names the others. The
regions of torch.func transforms become leaves for the same reason, and are written back by `restore`.

What cannot be retraced is a CaptureError at the user's line: the line of the node of Dynamo's graph that was being run.

Small tensor constants are written back as `torch.tensor` calls, so that their values are part of every cache key;
large ones become buffers with a source of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.traceback import preserve_node_meta
from torch.utils._pytree import tree_leaves

from moe_compiler import torch_private, transform_regions
from moe_compiler.errors import CaptureError
from moe_compiler.moe_ir import op_name, user_line

__all__ = ["capture", "nested_bodies", "restore", "unsearched"]

_INLINE_CONSTANT_LIMIT = 64
# What to do about sizes that the trace cannot relate to each other, and about everything else.
_SPLIT = (
    "cut rows whose number comes from the data with torch.split(rows, counts.tolist()), and put the results together "
    "with torch.cat: a slice between two cumulated counts has a size that nothing is known about"
)
_UNCHANGED = (
    "the graph goes to Inductor unchanged and computes the same; where a block of it should be rewritten, compile the "
    'module that holds the block by itself, and report the trace that TORCH_LOGS="+moepdl" shows'
)


class _Retrace(Interpreter):
    """Runs Dynamo's graph under the trace.

    A higher-order operator is recorded as one call with its own body. An autocast region is entered while its
    operators are traced, so that their recorded values have the dtypes that eager gives.
    """

    def __init__(self, module: GraphModule, mode: Any) -> None:
        super().__init__(module)
        self._mode = mode
        self._current: Node | None = None

    def run_node(self, n: Node) -> Any:
        self._current = n
        try:
            return super().run_node(n)
        except CaptureError:
            raise  # of a body, whose own line is nearer
        except Exception as error:
            raise _not_retraced(error, _line_from(n)) from error

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = super().get_attr(target, args, kwargs)
        node = self._current
        assert node is not None
        if isinstance(value, torch.Tensor):
            raise CaptureError(
                what=f"the graph reads the tensor attribute {target!r}",
                why="a tensor that Dynamo left as an attribute cannot be retraced without losing its identity",
                try_="pass it as an input, or register it as a parameter or buffer",
                where=_line_from(node),
            )
        return value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        node = self._current
        assert node is not None
        if torch_private.is_autocast_switch(target):
            return torch_private.record_autocast(target, args, kwargs)
        if not isinstance(target, torch._ops.HigherOrderOperator):
            return super().call_function(target, args, kwargs)
        return self._leaf(node, target, args, kwargs)

    def _leaf(self, node: Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a higher-order operator as one call; its bodies keep Dynamo's dialect unless they can be searched."""
        bodies = [item for item in tree_leaves((args, kwargs)) if isinstance(item, GraphModule)]
        searched = len(bodies) == 1 and torch_private.is_plain_region(target)
        with torch_private.proxy_tracing_disabled():
            if searched:
                traced = _retrace(args[0], self._mode, args[1:])
                return_value = args[0](*args[1:])
                args = (traced, *args[1:])
            elif target is transform_regions.TRANSFORM_REGION:
                return_value = transform_regions.run(args[0], args[1:], user_line(node))
            else:
                return_value = target(*args, **kwargs)
        return torch_private.record_call(target, node, args, kwargs, return_value)


def _line_from(node: Node) -> str:
    """The user's line of a node or, where Dynamo recorded none for it, of the first one behind it that has one."""
    while node.op != "root":
        line = user_line(node)
        if line:
            return line
        node = node.next
    return ""


def _not_retraced(error: Exception, where: str) -> CaptureError:
    reasons = str(error).strip().splitlines()
    sized = isinstance(error, torch_private.data_size_errors())
    return CaptureError(
        what=f"the graph could not be retraced to ATen: {type(error).__name__}",
        why=reasons[0] if reasons else "no message",
        try_=_SPLIT if sized else _UNCHANGED,
        where=where,
    )


def _retrace(module: GraphModule, mode: Any, arguments: Sequence[Any]) -> GraphModule:
    interpreter = _Retrace(transform_regions.outline(module), mode)
    with preserve_node_meta():
        traced = torch_private.make_fx_pre_dispatch(lambda *a: interpreter.run(*a), mode, arguments)
    _carry_over(module, traced)
    _write_constants(traced)
    return traced


def _carry_over(source: GraphModule, target: GraphModule) -> None:
    """Copy what later stages read: module metadata, parameter sources, and each placeholder's own metadata."""
    target.meta.update(source.meta)
    target._param_name_to_source = getattr(source, "_param_name_to_source", {})  # type: ignore[assignment]
    if hasattr(source, "compile_subgraph_reason"):
        target.compile_subgraph_reason = source.compile_subgraph_reason
    before = source.graph.find_nodes(op="placeholder")
    after = target.graph.find_nodes(op="placeholder")
    for old, new in zip(before, after, strict=True):
        for key, value in old.meta.items():
            new.meta.setdefault(key, value)
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source  # type: ignore[attr-defined]


def _write_constants(module: GraphModule) -> None:
    """Give tensor constants that the trace lifted to attributes an identity that caches can see."""
    sources: dict[str, Any] = module._param_name_to_source  # type: ignore[assignment]
    for node in list(module.graph.nodes):
        if node.op != "get_attr":
            continue
        value = getattr(module, str(node.target), None)
        if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter):
            continue
        if value.numel() <= _INLINE_CONSTANT_LIMIT and not value.dtype.is_complex:
            with module.graph.inserting_before(node):
                written = module.graph.call_function(
                    torch.tensor, (value.tolist(),), {"dtype": value.dtype, "device": value.device}
                )
            written.meta = dict(node.meta)
            node.replace_all_uses_with(written)
            module.graph.erase_node(node)
            if not any(n.target == node.target for n in module.graph.find_nodes(op="get_attr", sort=False)):
                delattr(module, str(node.target))
        else:
            from torch._dynamo.source import ConstantSource

            name = str(node.target)
            delattr(module, name)
            module.register_buffer(name, value, persistent=False)
            sources[name] = ConstantSource(name)
    module.recompile()


def capture(module: GraphModule, example_inputs: Sequence[Any]) -> GraphModule:
    """Dynamo's graph as pre-dispatch ATen. The input module is left as it is.

    Raises CaptureError when the graph cannot be retraced; the caller then hands the original graph on.
    """
    mode = torch_private.fake_mode_of(example_inputs)
    arguments = [torch_private.fakeify(mode, value) for value in example_inputs]
    try:
        return _retrace(module, mode, arguments)
    except CaptureError:
        raise
    except Exception as error:
        raise _not_retraced(error, "") from error


def restore(module: GraphModule) -> None:
    """Write back what a captured graph holds as leaves for the search alone: the regions of torch.func transforms."""
    for body in [module, *nested_bodies(module)]:
        transform_regions.restore(body)


def nested_bodies(module: GraphModule) -> list[GraphModule]:
    """The captured bodies of higher-order operators in `module`, outermost first, bodies of bodies included."""
    bodies: list[GraphModule] = []
    for node, inner in _calls_with_bodies(module):
        if torch_private.is_plain_region(node.target):
            bodies.append(inner)
            bodies.extend(nested_bodies(inner))
    return bodies


def unsearched(module: GraphModule) -> list[tuple[Node, str]]:
    """Calls of higher-order operators whose bodies choose among scores (a top-k) and are not searched, by name."""
    found: dict[Node, str] = {}
    for node, inner in _calls_with_bodies(module):
        if torch_private.is_plain_region(node.target):
            found |= dict(unsearched(inner))
        elif any(op_name(own) == "topk" for body in inner.modules() for own in _nodes(body)):
            found.setdefault(node, str(node.target))
    return list(found.items())


def _nodes(module: torch.nn.Module) -> list[Node]:
    return list(module.graph.nodes) if isinstance(module, GraphModule) else []


def _calls_with_bodies(module: GraphModule) -> Iterator[tuple[Node, GraphModule]]:
    """Each call of a higher-order operator with each of its bodies."""
    for node in module.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator):
            for source in node.all_input_nodes:
                inner = getattr(module, str(source.target), None) if source.op == "get_attr" else None
                if isinstance(inner, GraphModule):
                    yield node, inner
