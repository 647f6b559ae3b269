"""The simulation: cases computed by hand, an oracle that sends every message, bounds, limits and monotony."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_compiler.block_program import BlockSizes, backward_program, forward_program
from moe_compiler.critical_path import timing
from moe_compiler.device_model import DeviceModel, KernelModel
from moe_compiler.exchange_plan.block import operations
from moe_compiler.exchange_plan.builder import Block
from moe_compiler.exchange_plan.links import Links, link_table
from moe_compiler.exchange_plan.operation import ORDERS, Op, Way, dag_of, layers
from moe_compiler.exchange_plan.routing import uniform, zipf
from moe_compiler.exchange_plan.simulate import Simulation, simulate, times_us
from moe_compiler.exchange_plan.traffic import Traffic, traffic
from moe_compiler.launch import edges
from tests.moe_compiler.exchange_cases import FAST, MIXTRAL, QWEN3, SMALL, fixed, group, h200, transport, way

# 1000 bytes a microsecond.
SLOW = Links(1.0, 2.0)
CHUNKS = {"chunks": 2, "columns": 2}


def run(block: Block, t: Traffic, links: Links, chosen: Way, direction: str = "forward", **more) -> Simulation:
    model = more.pop("model", None) or h200()
    return simulate(operations(block, t, model, chosen, direction), t, links, chosen, model, **more)


def ends(simulation: Simulation) -> dict[str, float]:
    return {op.name: float(end[0]) for op, end in zip(simulation.ops, simulation.end, strict=True)}


def test_two_ranks_by_hand():
    """16 tokens, one of two experts each: 8 rows of 1010 bytes out and of 1000 home, every launch a microsecond."""
    t = group([16, 16], SLOW, block=SMALL)
    found = ends(run(SMALL, t, SLOW, way(transport(call_us=1.0)), model=fixed()))
    assert found["route"] == 2
    assert found["ep_dispatch_start"] == 3
    assert found["ep_dispatch"] == pytest.approx(3 + 1 + 8.08)
    assert found["ep_dispatch_wait"] == pytest.approx(12.08 + 2)
    assert found["combine"] == pytest.approx(14.08 + 4)  # order, gate_up, down, combine
    assert found["ep_combine"] == pytest.approx(18.08 + 1 + 8)
    assert found["ep_combine_wait"] == pytest.approx(27.08 + 2 + 1)  # and the sum


def test_two_ranks_with_local_rows_first_by_hand():
    t = group([16, 16], SLOW, block=SMALL)
    found = ends(run(SMALL, t, SLOW, way(transport(call_us=1.0, beside=0.25), "local_first"), model=fixed()))
    assert found["gate_up.local"] == 3 + 2 / 0.25  # beside the flight, which ends at 12.08
    assert found["ep_dispatch_wait"] == pytest.approx(14.08)
    assert found["combine.remote"] == pytest.approx(18.08)
    assert found["combine.local"] == pytest.approx(18.08 + 2 / 0.25)
    assert found["ep_combine_wait"] == pytest.approx(18.08 + 9 + 2 + 1)


def test_work_passes_the_end_of_a_flight_at_full_speed():
    links = Links(8.08, 0.0)  # the dispatch takes 1 us, from 30 to 31
    t = group([16, 16], links, block=SMALL)
    found = ends(run(SMALL, t, links, way(transport(beside=0.5), "local_first"), model=fixed(10.0)))
    assert found["ep_dispatch"] == pytest.approx(31)
    assert found["order.local"] == pytest.approx(30 + 10 + 0.5)
    assert found["gate_up.local"] == pytest.approx(30 + 20 + 0.5)


def test_a_transport_that_leaves_no_multiprocessor_stops_the_stream():
    t = group([16, 16], SLOW, block=SMALL)
    found = ends(run(SMALL, t, SLOW, way(transport(beside=0.0), "local_first"), model=fixed()))
    assert found["gate_up.local"] == pytest.approx(3 + 8.08 + 2)


def test_the_backward_by_hand():
    t = group([16, 16], SLOW, block=SMALL)
    found = ends(run(SMALL, t, SLOW, way(transport()), "backward", model=fixed()))
    assert found["ep_redispatch_wait"] == pytest.approx(1 + 8 + 2)
    assert found["combine"] == pytest.approx(11 + 5)
    assert found["ep_return_weights_wait"] == pytest.approx(16 + 8 * 4 / 1000 + 2 + 1)
    assert found["ep_combine_wait"] == pytest.approx(19.032 + 8 + 2 + 1)
    filled = ends(run(SMALL, t, SLOW, way(transport(), "filler"), "backward", model=fixed()))
    assert filled["grad_act"] == 12
    assert filled["grad_gate_up"] == 16
    # Rows leave at 14, after the scalars; the two gradients of weights run beside them.
    assert filled["ep_combine"] == pytest.approx(14 + 8)
    assert filled["ep_combine_wait"] == pytest.approx(24 + 1)


def test_a_programmatic_launch_gains_the_boundary_only_behind_a_launch():
    t = group([16, 16], SLOW, block=SMALL)
    plain = run(SMALL, t, SLOW, way(transport()), model=fixed())
    sooner = run(SMALL, t, SLOW, way(transport()), model=fixed(boundary_us=0.25))
    # route; gate_up, down and combine; neither order, which follows a wait and is no chain's second, nor a start.
    assert plain.us - sooner.us == pytest.approx(4 * 0.25)


def oracle(ops: tuple[Op, ...], t: Traffic, links: Links, chosen: Way) -> list[float]:
    """When each rank ends, message by message and rank by rank: plain Python over R^2 messages."""
    ranks = range(t.ranks)
    of = t.rank_class.tolist()
    node = [rank // (links.node or t.ranks) for rank in ranks]
    tokens, reach = t.tokens.tolist(), t.reach.tolist()
    clock, sending, busy = [0.0] * t.ranks, [0.0] * t.ranks, [[] for _ in ranks]
    arrived: dict[str, float] = {}
    for op in ops:
        if op.rows is not None:
            carrier = chosen.home if op.rows.home else chosen.out
            share, size = carrier.transport.shares[carrier.ctas] * 1e3, op.rows.bytes / op.rows.of
            message = {(s, r): tokens[of[s]] * reach[of[r]] * size for s in ranks for r in ranks if s != r}
            if op.rows.home:
                message = {(s, r): message[r, s] for s, r in message}
            near = {pair: b for pair, b in message.items() if node[pair[0]] == node[pair[1]]}
            far = {pair: b for pair, b in message.items() if pair not in near}
            takes = [sum(b for (s, _), b in near.items() if s == rank) / (links.gbs * share) for rank in ranks]
            reaches = [sum(b for (_, r), b in near.items() if r == rank) / (links.gbs * share) for rank in ranks]
            if far:
                for rank in ranks:
                    out = sum(b for (s, _), b in far.items() if node[s] == node[rank])
                    into = sum(b for (_, r), b in far.items() if node[r] == node[rank])
                    takes[rank] = max(takes[rank], out / (links.node_gbs * share))
                    reaches[rank] = max(reaches[rank], into / (links.node_gbs * share))
            begun = [max(clock[rank], sending[rank]) for rank in ranks]
            for rank in ranks:
                sending[rank] = begun[rank] + carrier.transport.call_us + max(takes[rank], max(reaches))
                busy[rank].append((begun[rank], sending[rank], carrier.transport.beside[carrier.ctas]))
            arrived[op.name] = max(sending) + (
                max(links.latency_us, links.node_latency_us) if far else links.latency_us
            )
            continue
        for rank in ranks:
            if op.kind == "wait":
                clock[rank] = max(clock[rank], arrived[op.flight])
            left = float(op.us[of[rank]])
            for begin, end, beside in busy[rank]:
                alone = min(left, max(begin - clock[rank], 0.0))
                clock[rank], left = clock[rank] + alone, left - alone
                if left > 0 and clock[rank] < end:
                    done = min(left, (end - clock[rank]) * beside)
                    clock[rank] = clock[rank] + done / beside if done == left else end
                    left -= done
            clock[rank] += left
    return clock


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("skewed", [False, True])
def test_classes_are_as_every_rank_and_every_message_by_itself(order: str, direction: str, skewed: bool):
    model = fixed()
    model = type(model)("test", "by hand", h200().kernels, 0.0)
    chosen = way(transport(call_us=2.0, beside=0.5, between_nodes=True), order, CHUNKS.get(order, 1))
    routing = (zipf if skewed else uniform)(16, 2)
    block = Block(BlockSizes(16, 2, 512, 256), shared=256)
    for ranks, node in ((2, None), (8, None), (16, 4), (12, 8)):
        links = Links(300.0, 3.0, node=node, node_gbs=100.0, node_latency_us=8.0)
        tokens = [64] * ranks if not skewed else [16 * (1 + rank % 4) for rank in range(ranks)]
        found = []
        for collapse in (True, False):
            t = traffic(routing, tokens, links, collapse=collapse)
            ops = operations(block, t, model, chosen, direction)
            simulation = simulate(ops, t, links, chosen, model)
            found.append(simulation.by_class[t.rank_class])
        assert torch.allclose(found[0], found[1], rtol=1e-9)
        assert found[1].tolist() == pytest.approx(oracle(ops, t, links, chosen), rel=1e-9)
        if not skewed and ranks in (2, 8, 16):
            assert traffic(routing, tokens, links).members.tolist() == [float(ranks)]


def test_the_launches_and_their_edges_are_the_compilers():
    for ranks, tokens in ((2, 16), (2, 4096), (8, 1024)):
        t = group([tokens] * ranks, SLOW)
        own = BlockSizes(128 // ranks, 8, 2048, 768)
        for direction, program in (
            ("forward", forward_program(own, router=False)),
            ("backward", backward_program(own)),
        ):
            variant = program.variant_for(ranks * t.capacity)
            ops = operations(QWEN3, t, h200(), way(transport()), direction)
            names = [op.name for op in ops if op.kind == "launch" and not op.name.endswith("_start")]
            kernels = [launch.kernel for launch in variant.launches]
            router = ["router_logits", "route"] if direction == "forward" else []
            assert names == router + kernels
            dag = dag_of(ops)
            expected = {
                (kernels[edge.producer], kernels[edge.consumer]) for edge in edges(variant) if edge.kind == "raw"
            }
            assert {(a, b) for a, b in dag.edges if a in kernels and b in kernels} == expected


def test_exchanges_stand_where_the_data_needs_them():
    t = group([64, 64], SLOW)
    dag = dag_of(operations(QWEN3, t, h200(), way(transport()), "forward"))
    assert set(dag.pred["ep_dispatch_start"]) == {"route"}
    assert set(dag.pred["gate_up"]) == {"ep_dispatch_wait", "order"}
    assert set(dag.pred["ep_combine_start"]) == {"combine"}
    assert dag.edges["ep_dispatch", "ep_combine"]["kind"] == "order"
    dag = dag_of(operations(QWEN3, t, h200(), way(transport(), "local_first"), "forward"))
    assert set(dag.pred["gate_up.local"]) == {"ep_dispatch_start", "order.local"}
    assert set(dag.pred["gate_up.remote"]) == {"ep_dispatch_wait", "order.remote"}
    assert set(dag.pred["ep_combine_start"]) == {"combine.remote"}


def test_an_operation_that_reads_ahead_is_refused():
    zero = torch.zeros(1)
    with pytest.raises(ValueError, match="reads a, which is only written later"):
        dag_of([Op("one", "launch", zero, ("a",), ("b",)), Op("two", "launch", zero, (), ("a",))])
    with pytest.raises(ValueError, match="stands twice"):
        dag_of([Op("one", "launch", zero), Op("one", "launch", zero)])


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("order", ORDERS)
def test_no_order_beats_the_critical_path_or_the_link(order: str, direction: str):
    block = Block(QWEN3.sizes, shared=1024, save=True)
    links = link_table().links()
    for name in ("push", "copy_engine", "distributed"):
        for ranks, tokens in ((2, 128), (8, 4096)):
            t = group([tokens] * ranks, links)
            chosen = way(link_table().transports[name], order, CHUNKS.get(order, 1))
            simulation = run(block, t, links, chosen, direction)
            dag = dag_of(simulation.ops)
            flights = simulation.flights

            def least(node: str, dag=dag, flights=flights) -> float:
                op = dag.nodes[node]["op"]
                if op.kind == "send":
                    flight = flights[node]
                    return flight.call_us + float(flight.us[0])
                return max(float(op.us[0]) - (h200().boundary_us if op.pdl else 0.0), 0.0)

            assert simulation.us >= timing(dag, least).total - 1e-6
            sent = sum(float(flight.out_bytes[0]) for flight in flights.values())
            assert simulation.us >= sent / (links.gbs * 1e3)


def test_without_communication_the_block_is_the_local_one():
    links = Links(FAST, 0.0)
    free = transport()
    for block, tokens in ((QWEN3, 1), (QWEN3, 4096), (MIXTRAL, 1024)):
        for direction in ("forward", "backward"):
            t = group([tokens] * 8, links, block=block)
            assert run(block, t, links, way(free), direction).us == pytest.approx(
                run(block, t, links, way(free), direction, local=True).us, rel=1e-9
            )
    # Free links do not make the memory faster: the rows are still read and written.
    flight = next(iter(run(QWEN3, group([4096] * 8, links), links, way(free)).flights.values()))
    assert float(flight.us[0]) > 10


def test_one_rank_sends_nothing_and_waits_for_nobody():
    links = link_table().links()
    t = group([4096], links)
    for name in ("push", "distributed"):
        found = run(QWEN3, t, links, way(link_table().transports[name]))
        assert found.us == run(QWEN3, t, links, way(link_table().transports[name]), local=True).us
        assert float(found.waited) == 0
        assert all(float(flight.out_bytes) == 0 for flight in found.flights.values())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_bytes_sent_are_bytes_received(order: str, direction: str):
    links = Links(300.0, 3.0, node=3, node_gbs=100.0)
    t = group([16, 0, 64, 300, 5, 5, 80], links, routing=zipf(128, 8))
    for kept in (False, True):
        chosen = way(transport(whole_slots=kept, between_nodes=True), order, CHUNKS.get(order, 1))
        for flight in run(QWEN3, t, links, chosen, direction).flights.values():
            sums = [float((each * t.members).sum()) for each in (flight.out_bytes, flight.in_bytes)]
            assert sums[0] == pytest.approx(sums[1], rel=1e-9)
            sums = [
                float((each / t.node_ranks * t.members).sum()) for each in (flight.node_bytes, flight.node_in_bytes)
            ]
            assert sums[0] == pytest.approx(sums[1], rel=1e-9)
            assert sums[0] > 0


GROUPS = st.sampled_from(
    [
        ([128, 128], False),
        ([4096] * 8, False),
        ([64, 2048, 0, 512], True),
        ([1024] * 6, True),
    ]
)


@settings(max_examples=60)
@given(
    GROUPS,
    st.sampled_from(ORDERS),
    st.sampled_from(["forward", "backward"]),
    st.sampled_from(["fused", "push", "copy_engine", "distributed"]),
    st.floats(10.0, 1000.0),
    st.floats(1.0, 4.0),
    st.floats(0.0, 30.0),
)
def test_more_bandwidth_is_never_slower_and_more_latency_never_faster(
    made, order: str, direction: str, name: str, gbs: float, times: float, latency: float
):
    tokens, skewed = made
    chosen = way(link_table().transports[name], order, CHUNKS.get(order, 1))
    routing = (zipf if skewed else uniform)(128, 8)
    t = traffic(routing, tokens, Links(gbs, latency))
    ops = operations(QWEN3, t, h200(), chosen, direction)

    def us(links: Links) -> float:
        return simulate(ops, t, links, chosen, h200()).us

    base = us(Links(gbs, latency))
    assert us(Links(gbs * times, latency)) <= base + 1e-6
    assert us(Links(gbs, latency + 5.0)) >= base - 1e-6


def test_a_hot_rank_is_waited_for_by_all():
    links = link_table().links()
    skewed = group([1024] * 8, links, routing=zipf(128, 8))
    even = group([1024] * 8, links)
    chosen = way(link_table().transports["push"])
    hot, plain = run(QWEN3, skewed, links, chosen), run(QWEN3, even, links, chosen)
    assert hot.us > plain.us
    busiest = int(skewed.reach.argmax())
    assert float(hot.waited[busiest]) == pytest.approx(float(hot.waited.min()))
    assert float(hot.waited.max()) > float(hot.waited[busiest])


def test_ways_at_once_are_as_one_by_one():
    links = link_table().links()
    t = group([512, 64, 2048, 512], links, routing=zipf(128, 8))
    table = link_table().transports
    ways = [way(table["fused"], "local_first"), way(table["push"], "local_first")]
    ops = operations(QWEN3, t, h200(), ways[0], "forward")
    assert times_us(ops, t, links, ways, h200()) == pytest.approx(
        [simulate(ops, t, links, each, h200()).us for each in ways], rel=1e-12
    )


def test_layers_follow_each_other():
    links = link_table().links()
    chosen = way(link_table().transports["copy_engine"], "local_first")
    t = group([4096, 4096], links)
    ops = operations(QWEN3, t, h200(), chosen, "forward")
    one = simulate(ops, t, links, chosen, h200())
    three = simulate(layers(ops, 3), t, links, chosen, h200())
    dag_of(three.ops)
    # Each layer's last operation is a wait, so nothing runs past the layer's end; a launch behind it gains no boundary.
    assert three.us == pytest.approx(3 * one.us)


def test_4096_ranks_of_their_own_take_seconds():
    links = Links(370.0, 3.0, node=8, node_gbs=400.0, node_latency_us=8.0)
    begun = time.perf_counter()
    t = group(
        [64 + rank % 512 for rank in range(4096)],
        links,
        block=Block(BlockSizes(512, 10, 2048, 512)),
        routing=zipf(512, 10),
        collapse=False,
    )
    chosen = way(link_table().transports["distributed"], "chunks", 2)
    run(Block(BlockSizes(512, 10, 2048, 512)), t, links, chosen)
    assert t.members.numel() == 4096
    assert time.perf_counter() - begun < 5


def test_a_launch_behind_a_flights_start_gains_no_boundary():
    links = Links(FAST, 0.0)
    t = group([16, 16], links, block=SMALL)
    chosen = way(transport(), "local_first")
    plain = run(SMALL, t, links, chosen, model=fixed())
    sooner = run(SMALL, t, links, chosen, model=fixed(boundary_us=0.25))
    # route, gate_up.local, gate_up.remote, down.remote, combine.remote and combine.local; down.local starts a chain.
    assert plain.us - sooner.us == pytest.approx(6 * 0.25)


def test_an_exchange_takes_no_less_than_its_floor():
    t = group([16, 16], SLOW, block=SMALL)
    found = ends(run(SMALL, t, SLOW, way(transport(floor_us=48.0)), model=fixed()))
    assert found["ep_dispatch_wait"] == pytest.approx(3 + 48)
    assert found["ep_combine_wait"] == pytest.approx(51 + 4 + 48 + 1)


def by_bytes() -> DeviceModel:
    """A device on which a launch takes as many microseconds as it moves bytes."""
    return DeviceModel("test", "made by hand", {name: KernelModel(0.0, 1.0) for name in h200().kernels}, 0.0)


def test_unused_slots_are_sorted_summed_and_filled():
    block = Block(BlockSizes(8, 2, 512, 256))
    t = group([100, 100], SLOW, block=block)  # 112 slots for each of two ranks
    times = []
    for every in (True, False):
        ops = operations(block, t, by_bytes(), way(transport()), "forward", every_slot=every)
        times.append({op.name: float(op.us[0]) for op in ops})
    used, live = times
    slots, rows, pairs = 224, float(t.reach[0]) * 200, 200.0
    assert used["order"] == slots * 2 * 12 + 4 * 4
    assert live["order"] == pytest.approx(pairs * 12 + 4 * 4)
    assert used["combine"] == (slots * 2 + slots) * 512 * 2
    assert live["combine"] == pytest.approx((pairs + rows) * 512 * 2)
    assert used["down"] - live["down"] == pytest.approx((slots * 2 - pairs) * 512 * 2)
    assert used["gate_up"] == live["gate_up"] and used["route"] == live["route"]


def test_rows_are_copied_before_and_added_up_behind():
    block = Block(BlockSizes(8, 2, 512, 256))
    links = Links(300.0, 3.0, node=2, node_gbs=100.0)
    t = group([100] * 4, links, block=block)
    kept, near, far = (float(each[0]) for each in (t.kept, t.near, t.far))
    out, home = 512 * 2 + 2 * (8 + 2), 512 * 2
    for packs in (False, True):
        ops = operations(block, t, by_bytes(), way(transport(packs=packs)), "forward")
        times = {op.name: float(op.us[0]) for op in ops}
        assert times["ep_dispatch_start"] == pytest.approx(2 * out * (kept + (near + far if packs else 0.0)))
        assert times["ep_combine_wait"] == pytest.approx(home * (kept + near + far + 100))
        assert times["ep_combine_start"] == times["ep_dispatch_wait"] == 0


def test_which_way_each_exchange_goes():
    t = group([64, 64], SLOW)
    for direction, home in (("forward", [False, True]), ("backward", [False, True, True])):
        ops = operations(QWEN3, t, h200(), way(transport()), direction)
        assert [op.rows.home for op in ops if op.rows is not None] == home


def test_whole_slices_cross_whether_used_or_not():
    links = Links(300.0, 3.0, node=4, node_gbs=100.0)
    t = group([100] * 8, links)
    chosen = way(transport(whole_slots=True, between_nodes=True))
    flight = run(QWEN3, t, links, chosen).flights["ep_combine"]
    row = 2048 * 2
    assert flight.out_bytes.tolist() == [112 * 3 * row]
    assert flight.node_bytes.tolist() == [112 * 4 * 4 * row]
    assert float(flight.us) == pytest.approx(112 * 16 * row / 100e3)


def test_a_capacity_that_no_chunk_divides_is_rounded_up():
    t = group([100, 100], SLOW)
    flight = run(QWEN3, t, SLOW, way(transport(whole_slots=True), "chunks", 3)).flights["ep_combine.chunk0"]
    assert float(flight.out_bytes) == pytest.approx(38 * 2048 * 2)
