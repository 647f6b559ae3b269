"""Every private corner of torch that the compiler leans on, wrapped once.

Each wrapper has a canary in tests/moe_compiler/test_torch_private.py that fails by the wrapper's name when a torch
release moves what is behind it. Nothing else in the project imports a torch name that starts with an underscore
inside a private module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.fx import GraphModule, Node

__all__ = [
    "aot_module",
    "code_cache_dir",
    "compile_fx",
    "configured",
    "current_compile_id",
    "fake_mode_of",
    "fakeify",
    "graph_break_count",
    "graph_break_errors",
    "has_data_dependent_sizes",
    "make_fx_pre_dispatch",
    "mode_options",
    "passes_of",
    "post_grad_pass_base",
    "static_input_indices",
    "subgraph_reason",
    "trace_artifact",
]


def fake_mode_of(example_inputs: Sequence[Any]) -> Any:
    """The FakeTensorMode that Dynamo traced with, or a new one when called outside of a compile."""
    from torch._dynamo.utils import detect_fake_mode
    from torch._guards import TracingContext
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = detect_fake_mode(list(example_inputs))
    if mode is None:
        context = TracingContext.try_get()
        mode = context.fake_mode if context is not None else None
    return mode if mode is not None else FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def fakeify(mode: Any, value: Any) -> Any:
    """`value` as a fake tensor of `mode`, with the symbolic sizes that the tracing context chose for it."""
    from torch._guards import TracingContext
    from torch._subclasses import FakeTensor

    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        return value
    context = TracingContext.try_get()
    symbolic = context.tensor_to_context.get(value) if context is not None else None
    if symbolic is None:
        return mode.from_tensor(value, static_shapes=True)
    return mode.from_tensor(value, static_shapes=False, symbolic_context=symbolic, source=symbolic.tensor_source)


def make_fx_pre_dispatch(function: Callable[..., Any], mode: Any, arguments: Sequence[Any]) -> GraphModule:
    """Trace `function` to pre-dispatch ATen under `mode`: autograd, autocast and composite operators still ahead."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch.fx.experimental.proxy_tensor import make_fx

    with mode, enable_python_dispatcher():
        return make_fx(function, pre_dispatch=True)(*arguments)


def make_fx_decomposed(function: Callable[..., Any], mode: Any, arguments: Sequence[Any]) -> GraphModule:
    """Trace `function` to the ATen subset that Inductor lowers after autograd."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx

    with disable_proxy_modes_tracing(), mode, enable_python_dispatcher():
        return make_fx(function, decomposition_table=select_decomp_table())(*arguments)


@contextmanager
def proxy_tracing_disabled() -> Iterator[None]:
    """Run code below a make_fx trace without recording it.

    Sizes that only data decides (how many rows an expert gets) may come up there and stay inside.
    """
    from torch._guards import detect_fake_mode
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    mode = detect_fake_mode()
    shapes = mode.shape_env if mode is not None else None
    with disable_proxy_modes_tracing(), shapes.ignore_fresh_unbacked_symbols() if shapes else nullcontext():
        yield


@contextmanager
def real_tensors() -> Iterator[None]:
    """Run code on real tensors although a compile with fake tensors is under way."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield


def is_autocast_switch(target: Any) -> bool:
    """Is this Dynamo's call that enters or leaves an autocast region?"""
    from torch.amp import autocast_mode

    return target in (autocast_mode._enter_autocast, autocast_mode._exit_autocast)


def record_autocast(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Enter or leave an autocast region of the traced graph for real; the trace records the same switch."""
    from torch.amp import autocast_mode
    from torch.fx.experimental import proxy_tensor

    if target is autocast_mode._exit_autocast:
        args[0].__exit__(None, None, None)
        return None
    region = torch.autocast(*args, **kwargs)
    region.__enter__()
    tracer: Any = proxy_tensor.get_proxy_mode().tracer  # type: ignore[union-attr]
    entered = next(node for node in reversed(tracer.graph.nodes) if node.target is autocast_mode._enter_autocast)
    # torch records the region with its weight cache off; what the user asked for is kept.
    entered.args, entered.kwargs = tuple(args), dict(kwargs)
    return region


def record_call(target: Any, node: Node, module: GraphModule, out: Any, rest: Sequence[Any], kwargs: Any) -> Any:
    """Record a higher-order operator as one leaf of the running make_fx trace; `out` are its fake results."""
    from torch.fx.experimental import proxy_tensor
    from torch.utils._pytree import tree_map

    tracer: Any = proxy_tensor.get_proxy_mode().tracer  # type: ignore[union-attr]
    name = tracer.get_fresh_qualname("hop_body")
    tracer.root.register_module(name, module)
    body = tracer.create_proxy("get_attr", name, (), {})
    operands = tuple(tree_map(tracer.unwrap_proxy, list(rest)))
    proxy = tracer.create_proxy("call_function", target, (body, *operands), kwargs, name=node.name)
    for key, value in node.meta.items():
        if key.startswith("_") or key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
            proxy.node.meta[key] = value
    proxy_tensor.track_tensor_tree(out, proxy, constant=None, tracer=tracer)
    return out


def compile_fx(module: GraphModule, example_inputs: Sequence[Any], patches: Mapping[str, Any]) -> Callable[..., Any]:
    """Inductor's own entry, with configuration patches for this compile only."""
    from torch._inductor.compile_fx import compile_fx as inductor

    return inductor(module, list(example_inputs), config_patches=dict(patches))  # type: ignore[return-value]


def aot_module(
    module: GraphModule,
    example_inputs: Sequence[Any],
    compile_graph: Callable[[GraphModule, bool], Callable[..., Any]],
    *,
    backward_now: bool = False,
) -> Callable[..., Any]:
    """AOTAutograd without Inductor; `compile_graph(graph_module, is_backward)` gets the forward and backward graph.

    The backward graph usually comes at the first backward call; with `backward_now` it comes at once.
    """
    from torch._functorch import config
    from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def forward(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return make_boxed_func(compile_graph(gm, False))

    def backward(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return make_boxed_func(compile_graph(gm, True))

    lazy = {"force_non_lazy_backward_lowering": True} if backward_now else {}
    with config.patch(lazy):
        return aot_module_simplified(
            module,
            list(example_inputs),
            fw_compiler=forward,
            bw_compiler=backward,
            partition_fn=min_cut_rematerialization_partition,
        )


def post_grad_pass_base() -> type:
    """The base class that lets a graph pass take part in Inductor's cache key."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    return CustomGraphPass


def configured(key: str) -> Any:
    """The value of a key of Inductor's configuration."""
    from torch._inductor import config

    return getattr(config, key)


def passes_of(value: Any) -> tuple[Any, ...]:
    """A configured pass as a tuple: Inductor takes none, one or several."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def mode_options(mode: str) -> dict[str, Any]:
    """What Inductor's `mode` means as configuration; raises RuntimeError for an unknown mode."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode))


def current_compile_id() -> str:
    """`frame/recompile` of the running Dynamo compile, "0/0" outside of one."""
    from torch._guards import CompileContext

    identity = CompileContext.current_compile_id()
    if identity is None or getattr(identity, "frame_id", None) is None:
        return "0/0"
    return f"{identity.frame_id}/{identity.frame_compile_id}"


def subgraph_reason(module: GraphModule) -> str:
    """Why Dynamo ended this graph where it did: "" when the frame was captured whole."""
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not getattr(reason, "graph_break", False):
        return ""
    stack = getattr(reason, "user_stack", None) or []
    last = stack[-1] if stack else None
    where = f"{last.filename}:{last.lineno}" if last is not None else ""
    first = str(reason.reason).strip().splitlines()[0] if str(reason.reason).strip() else "graph break"
    return f"{first} at {where}" if where else first


def graph_break_errors() -> tuple[type[Exception], ...]:
    """What Dynamo raises with `fullgraph=True` where it would else break the graph."""
    from torch._dynamo import exc

    return (exc.Unsupported, exc.UserError, exc.TorchRuntimeError)


def has_data_dependent_sizes(module: GraphModule) -> bool:
    """Does a value of Dynamo's graph have a size that only data decides (nonzero, item)?"""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    values = (node.meta.get("example_value") for node in module.graph.nodes)
    return any(isinstance(value, (torch.Tensor, torch.SymInt)) and free_unbacked_symbols(value) for value in values)


def graph_break_count() -> int:
    """How many graph breaks Dynamo has counted in this process."""
    from torch._dynamo.utils import counters

    return sum(counters["graph_break"].values())


def code_cache_dir() -> str:
    """The folder of Inductor's caches, where reports are kept beside compiled code."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def trace_artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
    """Hand an artifact to torch's structured trace (tlparse); free when no trace is taken."""
    from torch._logging import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=payload)


def static_input_indices(kwargs: Mapping[str, Any]) -> list[int]:
    """Which inputs Inductor treats as static (parameters): read from what reaches `compile_fx_inner`."""
    return list(kwargs.get("static_input_idxs") or [])
