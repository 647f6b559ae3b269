"""On a GPU, make the router's matmul a stage of its block.

Between the tokens and the choice of experts stands one narrow matmul. Left to the remainder it is a library call of its
own: a launch on the host, and on the device a boundary in front of the chain that nothing can overlap. As a stage it
is the chain's first launch, and the choice of experts starts behind it programmatically.

Only 16-bit matmuls are taken: where a model asks for a router in fp32, the matmul stays with the library that the
model's precision settings speak to. The logits keep their data type and are rounded once, as before; the order of the
sum is the kernel's, as it is the library's otherwise.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from moe_compiler.graph_pass import Context, graph_pass, insert
from moe_compiler.moe_ir import Level, is_moepdl, op_name
from moe_compiler.runtime_kernels import register as _register  # noqa: F401 - defines torch.ops.moepdl

__all__ = ["join_router"]

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)
_DTYPES = (torch.bfloat16, torch.float16)


def _matmul_behind(logits: Node) -> Node | None:
    """The mm or addmm that makes these logits, [T, E], or their first rows; perhaps in another shape on the way."""
    node = logits
    while node.target in _VIEWS and isinstance(node.args[0], Node):
        node = node.args[0]
    if node.target is _aten.slice.Tensor and node.args[1:3] == (0, 0):
        node = node.args[0]  # type: ignore[assignment]
    if node.target not in (_aten.mm.default, _aten.addmm.default):
        return None
    return node if node.meta["val"].shape[1:] == logits.meta["val"].shape[1:] else None


def _operands(matmul: Node, tokens: int | torch.SymInt) -> tuple[Node, Node, Node | None] | None:
    """(x, router, bias) of a matmul that the kernel computes, else None.

    Inductor adds rows of zeros to x where that suits the library: x itself has `tokens` of them.
    """
    operands = list(matmul.args)
    bias = operands.pop(0) if matmul.target is _aten.addmm.default else None
    if matmul.kwargs or len(operands) != 2:
        return None  # scaled by alpha or beta
    left = operands[0]
    if isinstance(left, Node) and left.target is _aten.constant_pad_nd.default and list(left.args[1])[:3] == [0, 0, 0]:  # type: ignore[arg-type]
        operands[0] = left.args[0]
    if operands[0].meta["val"].shape[0] != tokens:  # type: ignore[union-attr]
        return None
    values = [node.meta["val"] for node in (*operands, bias) if isinstance(node, Node)]
    if any(value.dtype not in _DTYPES or value.dtype != values[0].dtype for value in values):
        return None
    if values[0].device.type != "cuda" or values[0].stride(1) != 1:
        return None
    if bias is not None and bias.meta["val"].dim() != 1:  # type: ignore[union-attr]
        return None
    return operands[0], operands[1], bias  # type: ignore[return-value]


@graph_pass(level=Level.STAGES, numerics="rounding")
def join_router(graph: Graph, context: Context) -> int:
    """Take the matmul that makes a router's logits into the block.

    before   l = mm(x, permute(W)); w, i = route(l, k)
    after    l = router_logits(x, permute(W), None); w, i = route(l, k)
    """
    count = 0
    for node in list(graph.nodes):
        if not is_moepdl(node) or op_name(node) != "route":
            continue
        matmul = _matmul_behind(node.args[0])
        before = node.args[0].meta["val"]
        operands = None if matmul is None else _operands(matmul, before.shape[0])
        if matmul is None or operands is None:
            continue
        with graph.inserting_before(matmul):
            logits = insert(matmul, torch.ops.moepdl.router_logits.default, operands)
        if matmul.meta["val"].shape == before.shape:
            matmul.replace_all_uses_with(logits)
        else:
            for cut in [user for user in matmul.users if user.meta["val"].shape == before.shape]:
                cut.replace_all_uses_with(logits)
        node.update_arg(0, logits)
        count += 1
    if count:
        graph.eliminate_dead_code()
    return count
