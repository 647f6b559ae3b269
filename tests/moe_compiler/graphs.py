"""Graphs at the level of the canonical operators on fake CUDA tensors: what phase B gets, without a GPU."""

from __future__ import annotations

import torch
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from moe_compiler.backend import resolve_options
from moe_compiler.graph_pass import Context
from moe_compiler.report import Report
from moe_compiler.runtime_kernels import register  # noqa: F401 - defines the operators

E, K, H, I = 8, 2, 32, 16
# Width of a shared expert.
S = 24
# Neither bias, nor a scale for each expert, nor groups.
ROUTE = (None, None, K, "softmax", "before", 1, 1, 1, "-inf", True, False, 0.0, 1.0, torch.float32, torch.bfloat16)
EXPERTS = ("silu", True, "output", torch.bfloat16)


def forward_graph(tokens: int = 4, device: str = "cuda", between=None) -> GraphModule:
    """route and experts of one block; `between(weights)` may put something between the two."""

    def block(x, logits, gate_up, down):
        weights, ids = torch.ops.moepdl.route(logits, *ROUTE)
        if between is not None:
            weights, ids = between(weights, ids)
        return torch.ops.moepdl.experts(x, ids, weights, [gate_up], [], [down], [], [], [], *EXPERTS)

    with FakeTensorMode():
        made = [
            torch.empty(s, device=device, dtype=torch.bfloat16)
            for s in ((tokens, H), (tokens, E), (E, 2 * I, H), (E, H, I))
        ]
        return make_fx(block)(*made)


def backward_graph(
    needs=(True, True, True, False, True), tokens: int = 4, device: str = "cuda", at: str = "output"
) -> GraphModule:
    """experts_backward of one block, its results returned as far as they are needed."""

    def block(grad_y, x, ids, weights, gate_up, down, preact, perm, starts):
        grads = torch.ops.moepdl.experts_backward(
            *(grad_y, x, ids, weights, [gate_up], [], [down], [], [], []),
            *(preact, perm, starts, "silu", True, at, [*needs, False, False, False]),
        )
        kept = [g for g, needed in zip(grads, needs, strict=False) if needed]
        return [t for g in kept for t in (g if isinstance(g, list) else [g])]

    shapes = [(tokens, H), (tokens, H), None, (tokens, K), (E, 2 * I, H), (E, H, I), (tokens * K, 2 * I)]
    with FakeTensorMode():
        made = [
            torch.empty(s, device=device, dtype=torch.bfloat16)
            if s
            else torch.empty(tokens, K, device=device, dtype=torch.int64)
            for s in shapes
        ]
        made += [torch.empty(n, device=device, dtype=torch.int32) for n in (tokens * K, E + 1)]
        return make_fx(block)(*made)


def layers(tokens=4, count=1, shared=True, first=False, device="cuda", dtype=torch.bfloat16) -> GraphModule:
    """Layers of a block with (or without) a shared expert, after autograd; `first`: the shared expert stands first."""

    def routed(x, logits, gate_up, down):
        weights, ids = torch.ops.moepdl.route(logits, *ROUTE[:-1], dtype)
        return torch.ops.moepdl.experts(x, ids, weights, [gate_up], [], [down], [], [], [], *EXPERTS[:-1], dtype)

    def expert(x, gate, up, down):
        return torch.mm(torch.sigmoid(torch.mm(x, gate)) * torch.mm(x, up), down)

    def model(x, router, gate_up, down, *own):
        for _ in range(count):
            x = x * 0.5
            beside = expert(x, *own) if shared and first else None
            y = routed(x, torch.mm(x, router), gate_up, down)
            if shared and beside is None:
                beside = expert(x, *own)
            x = y if beside is None else y + beside
        return torch.mm(x, router)

    shapes = [(tokens, H), (H, E), (E, 2 * I, H), (E, H, I), (H, S), (H, S), (S, H)]
    with FakeTensorMode():
        return make_fx(model)(*[torch.empty(s, device=device, dtype=dtype) for s in shapes])


def context(phase: str = "forward", **options) -> Context:
    return Context(resolve_options(options), phase, Report(frame="0/0", status="rewritten"))


def calls(module: GraphModule) -> list[str]:
    """The names of our operators in graph order."""
    return [
        str(node.target).split(".")[1]
        for node in module.graph.nodes
        if node.op == "call_function" and getattr(node.target, "namespace", "") == "moepdl"
    ]
