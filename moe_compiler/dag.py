"""The dependency DAG of a graph: what must happen before what, and why.

Nodes are the graph's calls; edges carry a kind. "raw": reads what the other wrote. "war", "waw": by storage, for
operators that write into memory (aliases count as one memory). "order": collectives of one group, which every rank has
to start in the same order. "effect": order among operators with effects that are not visible in data. The DAG is a
networkx value, and its record can be printed, checked and drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import networkx as nx
import torch
from torch.fx import Graph, Node

from moe_compiler.aliasing import mutated_arguments
from moe_compiler.cost import cost_text
from moe_compiler.critical_path import Timing, timing
from moe_compiler.inline import named_arguments
from moe_compiler.moe_ir import COLLECTIVES, STAGES, WAITS, is_moepdl, op_name, size_expr
from moe_compiler.report import BranchRecord, DagRecord
from moe_compiler.runtime_kernels.weights import num_experts, preact_size

__all__ = [
    "block_sizes",
    "build_dag",
    "collective_group",
    "convex",
    "neighbourhood",
    "stage_sizes",
    "storages",
    "to_record",
    "without_getitems",
]


# Operators that write their argument without reading what was there.
_OVERWRITES = frozenset({"copy_", "fill_", "zero_"})


def storages(node: Node) -> set[object]:
    """What memory a node's value lives in: its fake storages, so views and in-place results share one."""
    found: set[object] = set()
    pending = [node.meta.get("val")]
    while pending:
        value = pending.pop()
        if isinstance(value, (tuple, list)):
            pending.extend(value)
        elif isinstance(value, torch.Tensor):
            found.add(value.untyped_storage()._cdata)
    return found


def build_dag(graph: Graph) -> nx.DiGraph:
    """The DAG over the calls of a graph. Node attribute: none; edge attribute: `kind`. Raises on a cycle."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    dag = nx.DiGraph(order=calls, position={node: index for index, node in enumerate(calls)})
    dag.add_nodes_from(calls)
    readers: dict[object, list[Node]] = {}
    writers: dict[object, Node] = {}
    last_effect: Node | None = None
    collectives: dict[str, Node] = {}
    for node in calls:
        overwritten = mutated_arguments(node) if op_name(node) in _OVERWRITES else []
        for source in node.all_input_nodes:
            if source in dag:
                dag.add_edge(source, node, kind="waw" if source in overwritten else "raw")
        for source in node.all_input_nodes:
            if source in overwritten:
                continue
            for storage in storages(source):
                if storage in writers and writers[storage] is not node and not dag.has_edge(writers[storage], node):
                    dag.add_edge(writers[storage], node, kind="raw")
                readers.setdefault(storage, []).append(node)
        for written in mutated_arguments(node):
            for storage in storages(written):
                for reader in readers.get(storage, ()):
                    if reader is not node and not dag.has_edge(reader, node):
                        dag.add_edge(reader, node, kind="war")
                previous = writers.get(storage)
                if previous is not None and previous is not node and not dag.has_edge(previous, node):
                    dag.add_edge(previous, node, kind="waw")
                writers[storage] = node
                readers[storage] = []  # whoever writes next comes after this one, and so after them
        collective = collective_group(node)
        if collective is not None:
            if collective in collectives and not dag.has_edge(collectives[collective], node):
                dag.add_edge(collectives[collective], node, kind="order")
            collectives[collective] = node
        if node.is_impure() and not mutated_arguments(node):
            if last_effect is not None and not dag.has_edge(last_effect, node):
                dag.add_edge(last_effect, node, kind="effect")
            last_effect = node
    if not nx.is_directed_acyclic_graph(dag):
        raise ValueError(f"the graph's dependencies are cyclic: {nx.find_cycle(dag)}")
    return dag


def collective_group(node: Node) -> str | None:
    """The group of a collective that starts here, None for any other call (a wait is ordered by what it waits for)."""
    if is_moepdl(node):
        return str(named_arguments(node)["group"]) if op_name(node) in COLLECTIVES else None
    if "c10d_functional" not in getattr(node.target, "namespace", "") or op_name(node) == "wait_tensor":
        return None
    named = named_arguments(node)
    return str(named["group_name"]) if "group_name" in named else None


def convex(dag: nx.DiGraph, nodes: Iterable[Node]) -> bool:
    """Can these nodes become one call: is nobody outside between two of them? Their getitem nodes count as inside.

    Looks only at what stands between the first and the last of them: a graph's order is one of its DAG's.
    """
    group = set(nodes)
    group |= {user for node in group for user in node.users if user in dag and op_name(user) == "getitem"}
    order: list[Node] = dag.graph["order"]
    position: dict[Node, int] = dag.graph["position"]
    places = [position[node] for node in group]
    behind: set[Node] = set()
    for node in order[min(places) : max(places) + 1]:
        before = dag.pred[node]
        if node in group:
            if any(source in behind for source in before):
                return False
        elif any(source in behind or source in group for source in before):
            behind.add(node)
    return True


def neighbourhood(dag: nx.DiGraph, nodes: Iterable[Node]) -> nx.DiGraph:
    """The sub-DAG of these nodes and whatever is one edge away, nodes in graph order."""
    group = set(nodes)
    near = {other for node in group for other in (*dag.predecessors(node), *dag.successors(node))}
    kept = nx.DiGraph()
    kept.add_nodes_from(node for node in dag if node in group or node in near)
    kept.add_edges_from((a, b, data) for a, b, data in dag.edges(data=True) if a in kept and b in kept)
    return kept


def stage_sizes(node: Node) -> dict[str, int]:
    """k, E, H, I, N and the element size w of a stage node, as far as its operands say."""
    named = named_arguments(node)
    sizes: dict[str, int] = {}

    def last(name: str, axis: int) -> int:
        return int(named[name][0].meta["val"].shape[axis])

    if isinstance(named.get("k"), int):
        sizes["k"] = named["k"]
    for name in ("gate", "down"):
        if isinstance(named.get(name), (list, tuple)) and named[name]:
            kept = [node.meta["val"] for node in named[name]]
            sizes |= {"E": int(num_experts(kept)), "w": kept[0].element_size()}
    if named.get("gate"):
        gate, up = ([node.meta["val"] for node in named.get(name, ())] for name in ("gate", "up"))
        width = int(preact_size(gate, up))
        sizes |= {"N": width, "H": last("gate", -1), "I": width // 2 if named.get("gated", True) else width}
    if named.get("down"):
        sizes |= {"H": last("down", -2), "I": last("down", -1)}
        sizes.setdefault("N", 2 * sizes["I"] if named.get("gated", True) else sizes["I"])
    if "perm" in named and "k" not in sizes and "starts" in named:
        sizes.setdefault("E", int(named["starts"].meta["val"].shape[0]) - 1)
    if op_name(node) in ("grad_down_bias", "grad_gate_up_bias"):
        rows = named["grad_y" if op_name(node) == "grad_down_bias" else "grad_preact"].meta["val"]
        sizes |= {"E": int(named["starts"].meta["val"].shape[0]) - 1, "w": rows.element_size()}
        sizes["H" if op_name(node) == "grad_down_bias" else "N"] = int(rows.shape[1])
    if op_name(node) == "route":
        logits = named["logits"].meta["val"]
        sizes |= {"E": int(logits.shape[1]), "w": logits.element_size()}
    if op_name(node) == "router_logits":
        router = named["router"].meta["val"]
        sizes |= {"H": int(router.shape[0]), "E": int(router.shape[1]), "w": router.element_size()}
    if op_name(node) == "order":
        sizes |= {"E": int(named["num_experts"]), "k": int(named["ids"].meta["val"].shape[1])}
    if op_name(node) in ("combine", "grad_input_weights"):
        pairs = named["pairs"].meta["val"]
        sizes |= {"H": int(pairs.shape[1]), "w": pairs.element_size()}
    return sizes


def block_sizes(stages: Iterable[Node]) -> dict[str, int]:
    """The sizes of a block, as far as its stages' operands say together."""
    sizes: dict[str, int] = {}
    for node in stages:
        for name, value in stage_sizes(node).items():
            sizes.setdefault(name, value)
    return sizes


def without_getitems(dag: nx.DiGraph) -> nx.DiGraph:
    """The DAG with every getitem merged into the call whose result it names."""
    merged = nx.DiGraph()
    owner = {node: node for node in dag}
    for node in dag:
        while op_name(owner[node]) == "getitem" and owner[node].args[0] in dag:
            owner[node] = owner[node].args[0]
    merged.add_nodes_from(dict.fromkeys(owner[node] for node in dag))
    for source, target, data in dag.edges(data=True):
        if owner[source] is not owner[target]:
            merged.add_edge(owner[source], owner[target], kind=data["kind"])
    return merged


def to_record(
    dag: nx.DiGraph,
    direction: str,
    time_us: Callable[[str, dict[str, int]], float | None] | None = None,
    branches: Sequence[BranchRecord] = (),
) -> DagRecord:
    """The DAG as plain values: stages with their bytes and FLOPs in T, results merged into the calls that make them.

    time_us: predicted time of a stage in a block of given sizes, for the critical path and the slack of each node; what
    it has no time for (neighbours too) counts as none. branches: what may run beside the stages.
    """
    dag = without_getitems(dag)
    nodes, edges = [], []
    of_branches = {name for branch in branches for name in branch.nodes}
    matmuls = {name: time for branch in branches for name, time in branch.predicted_us.items()}
    times: dict[Node, float] = {}
    block_k = {int(s["k"]) for s in (stage_sizes(n) for n in dag if _is_stage(n)) if "k" in s}
    for node in dag:
        entry: dict[str, object] = {"id": node.name, "label": op_name(node), "kind": "neighbour"}
        if _is_stage(node):
            sizes = stage_sizes(node)
            if "k" not in sizes and len(block_k) == 1:
                sizes["k"] = next(iter(block_k))
            entry |= {"kind": "stage", **cost_text(op_name(node), sizes)}
            predicted = time_us(op_name(node), sizes) if time_us is not None else None
            if predicted is not None:
                times[node] = predicted
                entry["predicted_us"] = round(predicted, 3)
        elif is_moepdl(node) and op_name(node) in COLLECTIVES | WAITS:
            entry["kind"] = "exchange"
        elif node.name in of_branches:
            entry["kind"] = "branch"
            if node.name in matmuls:
                times[node] = entry["predicted_us"] = matmuls[node.name]
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            entry["shape"] = [str(size_expr(size)) for size in value.shape]
        nodes.append(entry)
    if times:
        found: Timing[Node] = timing(dag, lambda node: times.get(node, 0.0))
        for node, entry in zip(dag, nodes, strict=True):
            entry |= {"slack_us": round(found.slack[node], 3), "critical": node in found.path}
    for source, target, data in dag.edges(data=True):
        edges.append({"source": source.name, "target": target.name, "kind": data["kind"]})
    record = DagRecord(direction=direction, nodes=nodes, edges=edges, branches=tuple(branches))
    record.check()
    return record


def _is_stage(node: Node) -> bool:
    return is_moepdl(node) and op_name(node) in STAGES
