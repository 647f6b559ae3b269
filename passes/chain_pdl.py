"""Group a block's stages into one chain and decide which of its launches are programmatic.

A chain is a convex group of stages that feed each other: nothing outside of it stands between two of them. Its first
launch is a plain one, so everything that ran before the chain (an optimiser step, a weight load, a cast of weights)
has ended when the second starts. Every later launch whose kernel waits before it touches data may carry the PDL
attribute. "on" keeps every edge that is provable, "auto" those of them that gain on this device, as measured or, where
they were not, as predicted, and "off" is the same chain without the attribute. Before that the launches get the tiles
that are known for the block, if any.

A chain with a branch beside it (a shared expert) may get a second stream, `moe_compiler.beside` decides that.

The graph itself is not rewritten here: the chains go to `lower` through the context.
"""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
from torch.fx import Graph, Node

from moe_compiler import device
from moe_compiler.beside import Decision, cut_beside, cuts, decide
from moe_compiler.branches import Branch, branches
from moe_compiler.branches import to_record as branch_record
from moe_compiler.dag import build_dag, convex, neighbourhood, to_record
from moe_compiler.device_model import DeviceModel
from moe_compiler.edge_gain import Gains, gains, provable
from moe_compiler.errors import PdlUnavailable
from moe_compiler.forecast import LARGE, forecast, tokens_by_variant
from moe_compiler.graph_pass import Context, graph_pass
from moe_compiler.launch import Chain, build_chain, device_of, is_stage_node, tokens_of, with_pdl
from moe_compiler.launch import to_record as chain_record
from moe_compiler.memory import in_chunks, memory_records
from moe_compiler.moe_ir import Level, op_name
from moe_compiler.passes.expand_stages import BLOCK
from moe_compiler.tuning.tune_chain import tiled_chain
from moe_compiler.verify import check_chain

__all__ = ["chain_pdl"]


def _groups(graph: Graph, dag: nx.DiGraph) -> list[list[Node]]:
    """Stage nodes by block, in graph order; a router joins the block that reads its ids, and the matmul of its logits
    joins with it, each when the whole is convex.

    A stage that is alone, or in a group that is not convex, stays an operator of its own.
    """
    blocks: dict[object, list[Node]] = {}
    routers: list[Node] = []
    for node in graph.nodes:
        if not is_stage_node(node):
            continue
        if op_name(node) in ("route", "router_logits"):
            routers.append(node)
        else:
            blocks.setdefault(node.meta.get(BLOCK, node), []).append(node)
    home = {node: block for block, stages in blocks.items() for node in stages}
    position = {node: index for index, node in enumerate(graph.nodes)}
    # The choice before the logits that it is made from.
    for router in reversed(routers):
        readers = {user for item in router.users for user in (item, *item.users) if user in home}
        for block in dict.fromkeys(home[reader] for reader in sorted(readers, key=position.__getitem__)):
            if convex(dag, [router, *blocks[block]]):
                blocks[block].insert(0, router)
                home[router] = block
                break
    found = []
    for stages in blocks.values():
        stages.sort(key=position.__getitem__)
        if len(stages) > 1 and convex(dag, stages):
            found.append(stages)
    return sorted(found, key=lambda stages: position[stages[-1]])


def _programmatic(
    chain: Chain, off: str, auto: bool, predicted_us: float | None, measured: Gains
) -> tuple[dict[str, frozenset[int]], dict[str, dict[int, str]]]:
    """Which launches carry the attribute, and why or why not, by variant.

    auto: whether an edge has to gain; predicted_us: what one is predicted to, None without a model of the device.
    """
    chosen: dict[str, frozenset[int]] = {}
    why: dict[str, dict[int, str]] = {}
    for variant in chain.program.variants:
        carried: set[int] = set()
        reasons: dict[int, str] = {}
        for index, launch in enumerate(variant.launches):
            if index == 0:
                reasons[index] = "the first launch of a chain is plain: it separates the chain from what ran before"
            elif off:
                reasons[index] = off
            elif index not in provable(variant):
                reasons[index] = f"{launch.kernel} does not wait on the device"
            elif auto and (loss := _no_gain(predicted_us, measured.of(variant.name, index))):
                reasons[index] = loss
            else:
                carried.add(index)
                reasons[index] = "the kernel waits before it reads what others wrote"
        chosen[variant.name], why[variant.name] = frozenset(carried), reasons
    return chosen, why


def _no_gain(predicted_us: float | None, measured_us: float | None) -> str:
    """Why an edge does not pay, "" when it does or nothing is known; what was measured counts before a prediction."""
    how, gain = ("measured", measured_us) if measured_us is not None else ("predicted", predicted_us)
    if gain is None or gain > 0:
        return ""
    return f'nothing is {how} to be gained on this device (options["pdl"] is "auto")'


def _why_off(context: Context, chain: Chain) -> str:
    if context.options.pdl == "off":
        return 'options["pdl"] is "off"'
    unavailable = device.why_no_pdl(chain.device)
    if unavailable and context.options.pdl == "on":
        raise PdlUnavailable(
            what=f'options["pdl"]="on", but {unavailable}',
            why="programmatic launch needs a CUDA GPU of compute capability 9.0 or above and triton 3.5 or newer",
            try_='options={"pdl": "auto"}',
        )
    return unavailable


def _beside(
    graph: Graph, dag: nx.DiGraph, chains: list[Chain], context: Context, model: DeviceModel | None
) -> list[tuple[list[Branch], Decision]]:
    """For each chain its branches and whether it runs beside them; a branch belongs to the first chain beside it."""
    found: list[tuple[list[Branch], Decision]] = []
    taken: set[Node] = set()
    may_cut = cuts(graph)
    for chain in chains:
        mine = [branch for branch in branches(dag, chain.nodes) if not taken.intersection(branch.nodes)]
        taken.update(node for branch in mine for node in branch.nodes)
        decision = Decision(None, "no branch")
        if mine:
            decision = decide(chain, mine, model, context.options, cut_beside(dag, chain, may_cut))
        found.append((mine, decision))
    return found


@graph_pass(level=Level.STAGES, numerics="exact")
def chain_pdl(graph: Graph, context: Context) -> int:
    """Make chains of the stages and mark the launches that may start before their predecessor has ended.

    before   order; gate_up; down; combine               (four calls)
    after    chain[order > gate_up > down > combine]     (one call of four launches, > programmatic where provable)
    """
    if not any(is_stage_node(node) for node in graph.nodes):
        return 0
    dag = build_dag(graph)
    direction = "backward" if context.phase == "backward" else "forward"
    stages = [node for node in graph.nodes if is_stage_node(node)]
    model = device.cost_model(device_of(stages[0]))
    tokens = tokens_of(stages[0])

    def time_us(stage: str, sizes: dict[str, int]) -> float | None:
        return None if model is None else model.time_us(stage, sizes, LARGE if tokens is None else tokens)

    chains = [build_chain(group, direction=direction, name=f"moe_{direction}") for group in _groups(graph, dag)]
    beside = _beside(graph, dag, chains, context, model)
    shown = neighbourhood(dag, [*stages, *(node for mine, _ in beside for branch in mine for node in branch.nodes)])
    found = [
        branch_record(
            branch,
            model,
            LARGE if tokens is None else tokens,
            gain=decision.gain_us,
            at_tokens=decision.at_tokens,
            overlapped=decision.beside is not None,
            limit=None if decision.beside is None else decision.beside.limit,
            why=decision.why,
        )
        for mine, decision in beside
        for branch in mine
    ]
    context.report.dags.append(to_record(shown, direction, time_us, found))
    for chain, (_, decision) in zip(chains, beside, strict=True):
        chain = replace(chain, beside=decision.beside)
        chain, tiles = tiled_chain(chain, context.options)
        off = _why_off(context, chain)
        auto = context.options.pdl == "auto"
        measured = gains(chain, tokens_by_variant(chain), context.options.tune)
        chosen, why = _programmatic(chain, off, auto, None if model is None else model.boundary_us, measured)
        chain = with_pdl(chain, chosen)
        whole: dict[str, str] = {}
        if context.options.memory == "low":
            program, whole = in_chunks(chain.program)
            chain = replace(chain, program=program)
        check_chain(chain, context.options)
        context.report.pdl_off = off
        forecasts = {} if model is None else forecast(chain, model)
        context.report.predictions = next((each.source for each in forecasts.values()), "")
        if not context.report.measured or measured.by_variant == {}:
            context.report.measured = measured.source  # of several chains one that was not measured has to be told
        if not context.report.tiles or tiles.startswith("not tuned"):
            context.report.tiles = tiles  # of several chains one that was not tuned has to be told
        # On a CPU a loop over the experts has memory of its own, which its program does not tell.
        counted = chain.device == "cuda" or context.options.memory == "low"
        memory = memory_records(chain.program, tokens_by_variant(chain), whole) if counted else {}
        context.report.schedule.append(chain_record(chain, why, forecasts, measured.by_variant, memory))
        context.chains.append(chain)
    return 0
