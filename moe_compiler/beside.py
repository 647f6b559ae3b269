"""Whether a chain runs beside its branches on a second stream, and up to how many tokens.

`options["overlap"]`: "off" never; "on" for any number of tokens, wherever it is right; "auto" where it is predicted to
gain (`branches.gain_us`), and only while a CUDA graph is captured: that is where the gains were measured, and where the
operator, the two events and the stream that come with it cost the host nothing. Without a graph few tokens are bound by
the host, which would pay for them at every call.

It is right beside any branch: neither feeds the other, and the DAG has an edge for whoever writes what the other reads.
One thing stands against it: where Inductor cuts a graph into several CUDA graphs, a cut between the fork and the join
would leave a capture that ends with work on a stream that was never joined. So what it may cut at must feed the chain,
or depend on it; else it may be scheduled anywhere, and the chain has no second stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import networkx as nx
import torch
from torch.fx import Graph, Node

from moe_compiler.branches import FEW_ROWS, Branch, Matmul, gain_us, idle_us
from moe_compiler.dag import block_sizes
from moe_compiler.device_model import DeviceModel
from moe_compiler.launch import Beside, Chain, tokens_of
from moe_compiler.moe_ir import op_name
from moe_compiler.options import Options

__all__ = ["Decision", "cut_beside", "cuts", "decide"]


@dataclass(frozen=True)
class Decision:
    """beside: None for one stream; why: the reason either way; gain_us, at_tokens: the prediction, None without one."""

    beside: Beside | None
    why: str
    gain_us: float | None = None
    at_tokens: int | None = None


def decide(chain: Chain, found: Sequence[Branch], model: DeviceModel | None, options: Options, cut: str) -> Decision:
    """Whether `chain` runs beside these branches, all of them. cut: why the graph allows no second stream, or ""."""
    matmuls = [matmul for branch in found for matmul in branch.in_tokens().values()]
    gain, tokens = _prediction(chain, matmuls, model)
    decision = Decision(None, "", gain, tokens)
    if options.overlap == "off":
        return replace(decision, why=f'{options.source_of("overlap")} is "off"')
    if "lower" in options.disable:
        return replace(decision, why=f"lower is disabled by {options.source_of('disable')}")
    if cut:
        return replace(decision, why=cut)
    if options.overlap == "on":
        beside = _beside(found, None, captured=False)
        # Tests and debugging: what runs on a device is seen in the graph, and computed where it stands.
        note = "" if chain.device == "cuda" else f"; on the {chain.device} there is one, and the start computes"
        return replace(decision, beside=beside, why=f'{options.source_of("overlap")} is "on"{note}')
    if gain is None or tokens is None:
        why = "there is no table of this device" if model is None else "its sizes or kernels are in no table"
        return replace(decision, why=f"{why}, so no gain is predicted")
    if gain <= 0:
        return replace(decision, why=f"nothing is predicted to be gained at T={tokens}")
    return replace(decision, beside=_beside(found, tokens, captured=True), why="predicted to gain, in CUDA graphs")


def _beside(found: Sequence[Branch], limit: int | None, *, captured: bool) -> Beside:
    nodes = tuple(node for branch in found for node in branch.nodes)
    last = tuple(node for branch in found for node in branch.last)
    return Beside(nodes, last, limit, captured)


def _prediction(chain: Chain, matmuls: Sequence[Matmul], model: DeviceModel | None) -> tuple[float | None, int | None]:
    """The gain and for which T: the chain's own, else the largest up to which every T gains; without any, one token."""
    own = tokens_of(chain.nodes[0])
    best: tuple[float | None, int | None] = (None, None)
    for tokens in [own] if own is not None else [1 << n for n in range(FEW_ROWS.bit_length())]:
        gain = _gain(chain, matmuls, model, tokens)
        if best[1] is None or (gain is not None and gain > 0):
            best = (gain, None if gain is None else tokens)
        if gain is None or gain <= 0:
            break
    return best


def _gain(chain: Chain, matmuls: Sequence[Matmul], model: DeviceModel | None, tokens: int) -> float | None:
    if model is None:
        return None
    sizes = block_sizes(chain.nodes)
    idle = idle_us(matmuls, tokens)
    whole = starting = 0.0
    for launch in chain.program.variant_for(tokens).launches:
        time = model.time_us(launch.kernel, sizes, tokens)
        if time is None:
            return None
        whole, starting = whole + time, starting + model.kernels[launch.kernel].fixed_us
    return None if idle is None else gain_us(whole, starting, idle)


def cuts(graph: Graph) -> dict[Node, str]:
    """The calls at which Inductor may cut a CUDA graph of this graph in two, and why.

    It cuts at what does not run on the GPU, at calls with graphs of their own, at sizes that the data decides and at
    operators that say so.
    """
    return {node: reason for node in graph.nodes if node.op == "call_function" and (reason := _cuts(node))}


def cut_beside(dag: nx.DiGraph, chain: Chain, found: Mapping[Node, str]) -> str:
    """Why a CUDA graph may end while the chain is under way, or ""; dag: of `build_dag`, found: of `cuts`."""
    if not found or chain.device != "cuda":
        return ""
    tied: set[Node] = set()
    for node in chain.nodes:
        tied |= nx.ancestors(dag, node) | nx.descendants(dag, node)
    free = next((node for node in found if node not in tied), None)
    return "" if free is None else f"a CUDA graph may end at {free.name}, which {found[free]}"


def _cuts(node: Node) -> str:
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return f"calls {op_name(node)}"
    if torch.Tag.cudagraph_unsafe in getattr(node.target, "tags", ()):
        return "may be in none"
    if node.meta.get("unbacked_bindings"):
        return "has sizes that the data decides"
    pending = [node.meta.get("val")]
    while pending:
        value = pending.pop()
        if isinstance(value, (tuple, list)):
            pending.extend(value)
        elif isinstance(value, torch.Tensor) and value.device.type != "cuda":
            return f"is on the {value.device.type}"
    return ""
