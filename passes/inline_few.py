"""On a CPU, write a block of few pairs out as gathered products, and let Inductor fuse them.

With a handful of (token, expert) pairs a block is a few matrix-vector products over weights that are read once. There
Inductor's own loop over the gathered weights reaches the memory's bandwidth and calls no operator at all, which no
chain of operators does. The same holds for some hundred pairs when all the block's weights stay in cache. It holds
only when the number of tokens is known while compiling, the weights are packed with contiguous rows or columns (else
the loop strides through memory), and the ids come from a router of this graph over just these experts, so that all of
them name one. Every other block becomes a chain.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from moe_compiler.graph_pass import Context, graph_pass, insert
from moe_compiler.inline import named_arguments, write_out
from moe_compiler.moe_ir import Level, is_moepdl, op_name
from moe_compiler.runtime_kernels import register as _register  # noqa: F401 - defines torch.ops.moepdl
from moe_compiler.runtime_kernels.activations import ActivationRule, parse_activation
from moe_compiler.runtime_kernels.route.reference import route

__all__ = ["FEW_PAIRS", "inline_few"]

# Up to here reading each pair's weights costs no more than reading each expert's once: they come from cache.
FEW_PAIRS = 128
# The same where a weight's columns are what is contiguous.
FEW_PAIRS_OF_COLUMNS = 32
# Up to here when all weights of the block together take at most so many bytes; measured on two cores with 32 MiB.
FEW_CACHED_PAIRS, CACHED_BYTES = 512, 1 << 24

_aten = torch.ops.aten
_convert = torch.ops.prims.convert_element_type.default


def _is_few(node: Node, named: dict[str, Any]) -> bool:
    tokens, k = named["ids"].meta["val"].shape
    value = named["x"].meta["val"]
    weights = [tensor.meta["val"] for role in ("gate", "up", "down") for tensor in named[role]]
    limit = FEW_PAIRS if all(w.stride(-1) == 1 for w in weights) else FEW_PAIRS_OF_COLUMNS
    if sum(w.numel() * w.itemsize for w in weights) <= CACHED_BYTES:
        limit = FEW_CACHED_PAIRS
    if value.device.type != "cpu" or not isinstance(tokens, int) or not 0 < tokens * int(k) <= limit:
        return False
    ids = named["ids"]
    # A router may be wider than the experts (null experts): its ids then name experts that are not there.
    routed = (
        op_name(ids) == "getitem"
        and is_moepdl(ids.args[0])
        and op_name(ids.args[0]) == "route"
        and ids.args[0].args[0].meta["val"].shape[1] == named["down"][0].meta["val"].shape[0]
    )
    packed = all(len(named[role]) <= 1 for role in ("gate", "up", "down")) and all(w.dim() == 3 for w in weights)
    packed = packed and all(len(named[role]) <= 1 for role in ("gate_bias", "up_bias", "down_bias"))
    return routed and packed and all(1 in w.stride()[-2:] for w in weights)


class _Writer:
    """Inserts ATen operators before the block's node."""

    def __init__(self, node: Node) -> None:
        self.node = node

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        with self.node.graph.inserting_before(self.node):
            return insert(self.node, target, args, kwargs)

    def wide(self, value: Node) -> Node:
        """In fp32 (fp64 stays): fused into the reader, never stored."""
        dtype = value.meta["val"].dtype
        return value if dtype in (torch.float32, torch.float64) else self(_convert, value, torch.float32)

    def products(self, rows_SK: Node, weight: Node, bias: list[Node], ids_S: Node) -> Node:
        """rows [S, in] times the chosen experts' [out, in], and their biases where there are any -> [S, out]."""
        # Along the dimension that is contiguous in memory, be it the one that is summed or not.
        transposed = weight.meta["val"].stride(-1) != 1
        if transposed:
            weight = self(_aten.permute.default, weight, [0, 2, 1])
        chosen = self.wide(self(_aten.index.Tensor, weight, [ids_S]))
        rows = self(_aten.unsqueeze.default, rows_SK, 2 if transposed else 1)
        total = self(_aten.sum.dim_IntList, self(_aten.mul.Tensor, chosen, rows), [1 if transposed else 2])
        return self(_aten.add.Tensor, total, self.wide(self(_aten.index.Tensor, bias[0], [ids_S]))) if bias else total

    def other(self, rule: ActivationRule, up: Node) -> Node:
        """What the activated gate is multiplied with."""
        if rule.limit is not None:
            up = self.bound(_aten.maximum.default, self.bound(_aten.minimum.default, up, rule.limit), -rule.limit)
        return self(_aten.add.Scalar, up, rule.shift) if rule.shift else up

    def bound(self, pick: Any, value: Node, limit: float) -> Node:
        """minimum or maximum with a number; Inductor takes no clamp at this place, it decomposes it earlier."""
        of = value.meta["val"]
        number = self(_aten.full.default, [], limit, dtype=of.dtype, device=of.device)
        return self(pick, value, number)

    def activation(self, rule: ActivationRule, gate: Node) -> Node:
        name = rule.name
        gate = gate if rule.limit is None else self.bound(_aten.minimum.default, gate, rule.limit)
        if name == "silu":
            inner = gate if rule.alpha == 1.0 else self(_aten.mul.Tensor, gate, rule.alpha)
            return self(_aten.mul.Tensor, gate, self(_aten.sigmoid.default, inner))
        if name in ("gelu", "gelu_tanh"):
            return self._gelu(gate, name == "gelu_tanh")
        positive = self(_aten.relu.default, gate)
        return positive if name == "relu" else self(_aten.mul.Tensor, positive, positive)

    def _gelu(self, gate: Node, tanh: bool) -> Node:
        half = self(_aten.mul.Tensor, gate, 0.5)
        if tanh:
            cube = self(_aten.mul.Tensor, self(_aten.mul.Tensor, gate, gate), gate)
            inner = self(_aten.add.Tensor, gate, self(_aten.mul.Tensor, cube, 0.044715))
            curve = self(_aten.tanh.default, self(_aten.mul.Tensor, inner, (2 / torch.pi) ** 0.5))
        else:
            curve = self(_aten.erf.default, self(_aten.mul.Tensor, gate, 0.5**0.5))
        return self(_aten.mul.Tensor, half, self(_aten.add.Tensor, curve, 1.0))


def _inline(node: Node, named: dict[str, Any]) -> None:
    write = _Writer(node)
    x, weights = named["x"], named["weights"]
    tokens, k = (int(size) for size in named["ids"].meta["val"].shape)
    compute = x.meta["val"].dtype
    ids_S = write(_aten.reshape.default, named["ids"], [tokens * k])
    scale_TK1 = write(_aten.unsqueeze.default, write.wide(weights), 2)
    rows = write(
        _aten.expand.default, write(_aten.unsqueeze.default, write.wide(x), 1), [tokens, k, x.meta["val"].shape[1]]
    )
    if named["weight_at"] == "input":
        rows = write.wide(write(_convert, write(_aten.mul.Tensor, rows, scale_TK1), compute))
    rows = write(_aten.reshape.default, rows, [tokens * k, x.meta["val"].shape[1]])
    hidden = write(_convert, write.products(rows, named["gate"][0], named["gate_bias"], ids_S), compute)
    gate, up = write.wide(hidden), None
    if named["up"]:
        up = write.wide(write(_convert, write.products(rows, named["up"][0], named["up_bias"], ids_S), compute))
    elif named["gated"]:
        half = int(hidden.meta["val"].shape[1]) // 2
        gate, up = write(_aten.slice.Tensor, gate, 1, 0, half), write(_aten.slice.Tensor, gate, 1, half, 2 * half)
    rule = parse_activation(named["activation"])
    act = write.activation(rule, gate)
    act = write(_aten.mul.Tensor, act, write.other(rule, up)) if up is not None else act
    act = write.wide(write(_convert, act, compute))
    out = write.wide(write(_convert, write.products(act, named["down"][0], named["down_bias"], ids_S), compute))
    pairs = write(_aten.reshape.default, out, [tokens, k, out.meta["val"].shape[1]])
    if named["weight_at"] == "output":
        pairs = write(_aten.mul.Tensor, pairs, scale_TK1)
    y = write(_convert, write(_aten.sum.dim_IntList, pairs, [1]), named["dtype"])
    node.replace_all_uses_with(y)
    node.graph.erase_node(node)


@graph_pass(level=Level.MOE, numerics="exact")
def inline_few(graph: Graph, context: Context) -> int:
    """Write CPU blocks of few pairs, router and experts, out as gathered products for Inductor to fuse.

    before   w, i = route(l, k, ..); y = experts(x, i, w, [W1], [], [W2], ..)       (T * k few, T constant)
    after    w, i = topk(softmax(l)); a = silu(sum(W1[i] * x[:, None], 2)); y = sum(w * sum(W2[i] * a[:, None], 2), 1)
    """
    if context.options.remainder != "inductor":
        return 0
    count = 0
    for node in list(graph.nodes):
        if not is_moepdl(node) or op_name(node) != "experts":
            continue
        named = named_arguments(node)
        if _is_few(node, named):
            _inline(node, named)
            write_out(named["ids"].args[0], route, ("logits", "bias", "expert_scale"))
            count += 1
    if count:
        context.report.notes.append(f"{count} of the CPU's blocks of few pairs written out as products for Inductor")
    return count
