"""Every private corner of torch that the compiler leans on, wrapped once.

Each wrapper has a canary in tests/moe_compiler/test_torch_private.py that fails by the wrapper's name when a torch
release moves what is behind it. Nothing else in the project imports a torch name that starts with an underscore
inside a private module.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

__all__ = [
    "CompiledFrame",
    "aot_module",
    "break_of",
    "code_cache_dir",
    "compile_fx",
    "compiled_frames",
    "configured",
    "configured_dynamo",
    "current_compile_id",
    "data_size_errors",
    "dispatch_mode_base",
    "fake_mode_of",
    "fakeify",
    "forget_compiled",
    "graph_break_count",
    "graph_break_errors",
    "graph_pass_base",
    "has_data_dependent_sizes",
    "hooks_step",
    "inference_aware_pass_base",
    "is_cut_by_ddp",
    "is_plain_region",
    "is_transform_call",
    "is_transform_switch",
    "is_wrapped_by_transform",
    "keep_order",
    "make_fx_pre_dispatch",
    "mode_options",
    "passes_of",
    "quiet_dynamo",
    "static_input_indices",
    "subgraph_break",
    "trace_artifact",
    "transform_step",
    "uncached_fakes",
    "user_frame",
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


@contextmanager
def uncached_fakes(mode: Any) -> Iterator[None]:
    """Run code on fake tensors under `mode`, without its cache of results."""
    from torch._subclasses.fake_tensor import disable_fake_tensor_cache

    with mode, disable_fake_tensor_cache(mode):
        yield


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


def dispatch_mode_base() -> type:
    """The base class that lets a mode see every ATen operator that runs, with its arguments."""
    from torch.utils._python_dispatch import TorchDispatchMode

    return TorchDispatchMode


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


def is_plain_region(target: Any) -> bool:
    """Does this higher-order operator run its first argument, its only body, on all the others (a checkpoint)?"""
    return target in (torch.ops.higher_order.tag_activation_checkpoint, torch.ops.higher_order.wrap)


def is_transform_call(target: Any) -> bool:
    """Does this call change what torch.func transforms (vmap, grad, jvp) are active, or wrap a tensor for one?"""
    from torch._functorch.predispatch import lazy_load_decompositions

    module = str(getattr(target, "__module__", "")) if callable(target) else ""
    return module.startswith(("torch._functorch", "torch._C._functorch")) and target is not lazy_load_decompositions


def transform_step(target: Any) -> int:
    """1 for the call that enters a transform, -1 for the one that leaves it, 0 for any other."""
    name = str(getattr(target, "__name__", "")) if is_transform_call(target) else ""
    enters = name.endswith("_increment_nesting") or name == "_enter_dual_level"
    return enters - (name.endswith("_decrement_nesting") or name == "_exit_dual_level")


def is_transform_switch(target: Any) -> bool:
    """Does this call switch, by a constant, what autograd allows inside of a transform?"""
    from torch._C import _functorch

    return target in (torch._C._set_fwd_grad_enabled, _functorch.set_inplace_requires_grad_allowed)


def hooks_step(target: Any) -> int:
    """1 for the call that forbids hooks on saved tensors (grad forbids them), -1 for the one that allows them."""
    from torch._C import _autograd

    return (target is _autograd._saved_tensors_hooks_disable) - (target is _autograd._saved_tensors_hooks_enable)


def is_wrapped_by_transform(value: torch.Tensor) -> bool:
    """Does a tensor belong to a level of a torch.func transform, active or left?"""
    from torch._C import _functorch

    return _functorch.is_functorch_wrapped_tensor(value)


def record_call(target: Any, node: Node, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Any:
    """Record a higher-order operator as one leaf of the running make_fx trace; `out` are its fake results.

    Bodies among the arguments become modules of the traced root.
    """
    from torch.fx.experimental import proxy_tensor
    from torch.utils._pytree import tree_map

    tracer: Any = proxy_tensor.get_proxy_mode().tracer  # type: ignore[union-attr]

    def recorded(value: Any) -> Any:
        if not isinstance(value, GraphModule):
            return tracer.unwrap_proxy(value)
        name = tracer.get_fresh_qualname("hop_body")
        tracer.root.register_module(name, value)
        return tracer.create_proxy("get_attr", name, (), {})

    operands, named = tree_map(recorded, (tuple(args), dict(kwargs)))
    proxy = tracer.create_proxy("call_function", target, operands, named, name=node.name)
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
    joint: Callable[[Graph], object],
    backward_now: bool = False,
) -> Callable[..., Any]:
    """AOTAutograd without Inductor; `compile_graph(graph_module, is_backward)` gets the forward and backward graph.

    `joint` gets the graph of both before it is parted. The backward graph usually comes at the first backward call;
    with `backward_now` it comes at once.
    """
    from torch._dynamo.utils import counters
    from torch._functorch import config
    from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def forward(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return make_boxed_func(compile_graph(gm, False))

    def backward(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return make_boxed_func(compile_graph(gm, True))

    def partition(gm: GraphModule, *args: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        joint(gm.graph)
        return min_cut_rematerialization_partition(gm, *args, **kwargs)

    # By this count Dynamo's optimizer for DistributedDataParallel sees that a part of the graph went to AOTAutograd.
    counters["aot_autograd"]["total"] += 1
    lazy = {"force_non_lazy_backward_lowering": True} if backward_now else {}
    with config.patch(lazy):
        return aot_module_simplified(
            module,
            list(example_inputs),
            fw_compiler=forward,
            bw_compiler=backward,
            partition_fn=partition,
        )


def graph_pass_base() -> type:
    """The base class that lets a graph pass take part in Inductor's cache key."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    return CustomGraphPass


def inference_aware_pass_base() -> type | None:
    """The same for a pass that is also told whether the graph is compiled for inference; torch 2.11 has none."""
    from torch._inductor import custom_graph_pass

    return getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)


def configured(key: str, *default: Any) -> Any:
    """The value of a key of Inductor's configuration; `default`, when given, is for a torch that lacks the key."""
    from torch._inductor import config

    return getattr(config, key, *default)


def passes_of(value: Any) -> tuple[Any, ...]:
    """A configured pass as a tuple: Inductor takes none, one or several."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def mode_options(mode: str) -> dict[str, Any]:
    """What Inductor's `mode` means as configuration; raises RuntimeError for an unknown mode."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode))


def keep_order() -> dict[str, Any]:
    """Inductor's settings under which calls of other libraries and operators stay in the order of the graph.

    Else it orders anew for the least memory, and would compute early what is to be computed while an exchange travels.
    """
    return {"reorder_for_peak_memory": False}


def current_compile_id() -> str:
    """`frame/recompile` of the running Dynamo compile, "0/0" outside of one."""
    from torch._guards import CompileContext

    identity = CompileContext.current_compile_id()
    if identity is None or getattr(identity, "frame_id", None) is None:
        return "0/0"
    return f"{identity.frame_id}/{identity.frame_compile_id}"


def subgraph_break(module: GraphModule) -> tuple[str, str] | None:
    """(Dynamo's reason, the user's line) of the break that ended this graph; None when the frame was captured whole."""
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not getattr(reason, "graph_break", False):
        return None
    return str(reason.reason), user_frame(getattr(reason, "user_stack", None) or [])


@dataclass(frozen=True)
class CompiledFrame:
    """What became of one frame that Dynamo looked at.

    failure: why it was skipped, "" when it was not; broken: why its graph ended early, "" when it did not
    where:   the user's line of the failure, or the frame's first
    started: when, in microseconds; the clock is the same for all frames
    """

    identity: str
    function: str
    failure: str
    broken: str
    where: str
    started: int


def compiled_frames(after: int = 0) -> list[CompiledFrame]:
    """The frames that Dynamo looked at and that began after a moment, oldest first; it keeps the last 64."""
    from torch._dynamo.utils import get_compilation_metrics

    breaks = {error.__qualname__ for error in graph_break_errors()}  # not what a backend raised
    found = []
    for metric in get_compilation_metrics():
        name = getattr(metric, "co_name", None)
        if name is None or (metric.start_time_us or 0) <= after:
            continue
        # A class's name, or its repr in older versions.
        kind = re.findall(r"\w+", str(metric.fail_type))[-1]
        failed = metric.fail_reason or "" if kind in breaks else ""
        place = f"{metric.co_filename}:{metric.co_firstlineno}"  # of a resumed frame, where it goes on
        if failed and metric.fail_user_frame_filename and not is_torch_file(metric.fail_user_frame_filename):
            place = f"{metric.fail_user_frame_filename}:{metric.fail_user_frame_lineno}"
        found.append(
            CompiledFrame(
                identity=str(metric.compile_id),
                function=name,
                failure=failed,
                broken=next(iter(metric.restart_reasons or ()), ""),
                where=place,
                started=metric.start_time_us or 0,
            )
        )
    return found


def is_cut_by_ddp(module: GraphModule) -> bool:
    """Did Dynamo's optimizer for DistributedDataParallel end this graph, between two buckets of gradients?"""
    reason = getattr(module, "compile_subgraph_reason", None)
    return str(getattr(reason, "reason", "")).startswith("DDPOptimizer")


def graph_break_errors() -> tuple[type[Exception], ...]:
    """What Dynamo raises with `fullgraph=True` where it would else break the graph.

    A size that the data decides and that torch's own code for an operator asks for (`tolist`, a split) comes through
    as it was raised.
    """
    from torch._dynamo import exc

    return (exc.Unsupported, exc.UserError, exc.TorchRuntimeError, *data_size_errors())


def data_size_errors() -> tuple[type[Exception], ...]:
    """What a trace raises where it cannot relate sizes that come from the data to each other."""
    from torch.fx.experimental import symbolic_shapes

    return (symbolic_shapes.GuardOnDataDependentSymNode, symbolic_shapes.PendingUnbackedSymbolNotFound)


def break_of(error: BaseException) -> tuple[str, str]:
    """(Dynamo's reason, the user's line) of what `graph_break_errors` lists."""
    return str(error), user_frame(getattr(error, "real_stack", None) or [])


def user_frame(stack: Sequence[Any]) -> str:
    """`file:line` of the innermost frame that is not torch's own; "" for no frame."""
    frames = [frame for frame in stack if not is_torch_file(frame.filename)] or list(stack)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def is_torch_file(path: str) -> bool:
    """Is this one of torch's own files?"""
    return path.startswith(os.path.dirname(torch.__file__) + os.sep)


@contextmanager
def configured_dynamo(settings: Mapping[str, Any]) -> Iterator[None]:
    """Dynamo's own settings, for the code below."""
    with torch._dynamo.config.patch(dict(settings)):
        yield


def forget_compiled(function: Callable[..., Any]) -> None:
    """Let Dynamo look at a function again, as if it had never compiled or given up its frame."""
    from torch._dynamo.eval_frame import reset_code

    seen: Any = getattr(function, "__func__", function)
    while seen is not None:
        if hasattr(seen, "__code__"):
            reset_code(seen.__code__)
        seen = getattr(seen, "__wrapped__", None)


@contextmanager
def quiet_dynamo() -> Iterator[None]:
    """No log of Dynamo's for a trace that is only a question."""
    import logging

    loggers = [logging.getLogger(name) for name in ("torch._dynamo", "torch._subclasses.fake_tensor")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


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
