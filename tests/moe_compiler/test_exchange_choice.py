"""What is chosen: never what is slower or cannot be done, with reasons that are the numbers."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import torch

from moe_compiler.block_program import BlockSizes, forward_program
from moe_compiler.branches import FORK_JOIN_US
from moe_compiler.exchange_plan.block import operations
from moe_compiler.exchange_plan.builder import Block
from moe_compiler.exchange_plan.choose import Choice, Group, Limits, carriers, choose, one_rank_us, orders
from moe_compiler.exchange_plan.links import Links, LinkTable, link_table
from moe_compiler.exchange_plan.operation import WISHED, Way
from moe_compiler.exchange_plan.routing import zipf
from moe_compiler.exchange_plan.simulate import simulate
from tests.moe_compiler.exchange_cases import FAST, MIXTRAL, QWEN3, group, h200, transport

TABLE = link_table()
NODES = TABLE.links(node=8, node_gbs=400.0, node_latency_us=8.0)


def chosen(
    tokens: int, ranks: int, block: Block = QWEN3, direction: str = "forward", links: Links | None = None, **more
) -> Choice:
    used = links or TABLE.links()
    limits = more.pop("limits", Limits())
    t = group([tokens] * ranks, used, block=block, **more)
    return choose(block, Group(t, used, h200(), TABLE), direction, limits)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("tokens", "ranks"), [(1, 2), (128, 2), (4096, 2), (16384, 2), (4096, 8)])
def test_the_choice_is_the_fastest_that_is_possible(tokens: int, ranks: int, direction: str):
    links = TABLE.links()
    t = group([tokens] * ranks, links)
    choice = choose(QWEN3, Group(t, links, h200(), TABLE), direction)
    possible = [each for each in choice.considered if each.way.order not in WISHED]
    assert choice.best.way.order not in WISHED
    assert choice.best.us <= min(each.us for each in possible) + FORK_JOIN_US
    assert choice.gain_us == 0 or choice.gain_us > FORK_JOIN_US
    assert choice.simulation.us == pytest.approx(choice.best.us)
    assert choice.live_us <= choice.best.us
    assert choice.exposed_us > 0
    # Every pair of transports was tried: none of them is better for this order.
    for out in carriers(TABLE, several_nodes=False):
        way = Way(out, choice.best.way.home, choice.best.way.order, choice.best.way.chunks)
        if out.transport.packs == choice.best.way.out.transport.packs:
            assert simulate(choice.ops, t, links, way, h200()).us >= choice.best.us - 1e-6


def test_few_tokens_take_the_kernel_with_flags_and_many_overlap():
    assert chosen(1, 2).best.way.transports == ("fused", "fused")
    assert chosen(128, 2).best.way.transports == ("push", "push")
    many = chosen(16384, 2)
    assert many.best.way.order == "local_first"
    assert many.best.way.transports == ("copy_engine", "copy_engine")
    assert many.gain_us > 100


def test_what_is_exposed_is_told_from_a_local_block_without_overlap_and_packing():
    links = TABLE.links()
    t = group([16384] * 2, links)
    plain = Way(*[carriers(TABLE, several_nodes=False, among=frozenset({"push"}))[0]] * 2)
    ops = operations(QWEN3, t, h200(), plain, "forward")
    many = chosen(16384, 2)
    assert many.best.way.out.transport.packs
    assert many.local_us == pytest.approx(simulate(ops, t, links, plain, h200(), local=True).us)


def test_gradients_of_weights_hide_the_way_home():
    choice = chosen(4096, 2, direction="backward")
    assert choice.best.way.order == "filler"
    assert choice.exposed_us < choice.plain.us - choice.local_us


def test_between_nodes_only_what_works_there():
    choice = chosen(4096, 64, links=NODES)
    assert {each.way.transports for each in choice.considered} == {("distributed", "distributed")}
    assert choice.best.way.order == "chunks"


def test_no_transport_between_nodes_is_an_error():
    table = LinkTable("here", 388.0, 2.9, {"test": transport()}, {})
    t = group([64] * 16, NODES)
    with pytest.raises(ValueError, match="none of the transports test works between nodes"):
        choose(QWEN3, Group(t, NODES, h200(), table), "forward")
    with pytest.raises(ValueError, match="none of the transports push works between nodes"):
        chosen(64, 16, links=NODES, limits=Limits(frozenset({"push"})))


def test_one_rank_has_nothing_to_overlap():
    choice = chosen(4096, 1)
    assert choice.best == choice.plain
    assert choice.exposed_us == 0
    assert choice.wished is None
    assert choice.why.startswith("there is nothing that may overlap")


def test_the_reason_has_the_times_of_the_choice_and_of_its_rivals():
    choice = chosen(16384, 2)
    assert f"{choice.best.us:.1f} us against {choice.plain.us:.1f} without overlap" in choice.why
    assert choice.plain.way.label in choice.why
    assert "next by transport" in choice.why
    little = chosen(128, 2)
    assert little.why.startswith("nothing that overlaps gains more than 2 us; the best takes ")


def test_which_orders_there_are():
    t = group([4096, 4096], TABLE.links())
    assert orders(QWEN3, t, "forward")[:2] == (("plain", 1), ("local_first", 1))
    assert ("filler", 1) in orders(QWEN3, t, "backward")
    assert ("filler", 1) in orders(Block(QWEN3.sizes, shared=512), t, "forward")
    assert ("chunks", 8) in orders(QWEN3, t, "forward")
    few = group([1, 1], TABLE.links())
    assert [order for order, _ in orders(QWEN3, few, "forward")].count("chunks") == 0
    narrow = Block(BlockSizes(8, 2, 384, 256))
    assert all(order not in WISHED for order, _ in orders(narrow, t, "forward"))


def test_a_choice_keeps_to_its_limits():
    free = chosen(16384, 2)
    only = chosen(16384, 2, limits=Limits(frozenset({"distributed"})))
    assert {each.way.transports for each in only.considered} == {("distributed", "distributed")}
    assert only.best.us > free.best.us
    off = chosen(16384, 2, limits=Limits(overlap="off"))
    assert off.best == off.plain == free.plain
    assert off.why.startswith("there is nothing that may overlap")
    on = chosen(128, 2, limits=Limits(overlap="on"))
    assert on.best.way.order not in ("plain", *WISHED)
    assert on.gain_us < 0
    cut = chosen(16384, 2, limits=Limits(overlap="on", chunks=3))
    assert (cut.best.way.order, cut.best.way.chunks) == ("chunks", 3)
    whole = chosen(16384, 8, limits=Limits(chunks=1))
    assert whole.best.way.order == "local_first"
    assert chosen(16384, 8).best.way.order == "chunks"


def test_a_shared_expert_is_filler():
    plain, shared = chosen(1024, 2), chosen(1024, 2, Block(QWEN3.sizes, shared=4096))
    alone = shared.local_us - plain.local_us
    assert alone > 50
    assert shared.best.way.order != "plain"
    assert shared.exposed_us < plain.exposed_us


def test_better_links_are_never_worse():
    times = [chosen(4096, 8, MIXTRAL, links=Links(gbs, 3.0)).best.us for gbs in (50.0, 100.0, 200.0, 400.0, FAST)]
    # What overlap gains may fall under what it has to gain, so a choice can be that much slower.
    assert all(slower >= faster - FORK_JOIN_US for slower, faster in pairwise(times))


def test_one_rank_is_the_chain_that_the_compiler_runs_there():
    sizes = QWEN3.sizes
    for tokens in (4, 128, 4096):
        launches = forward_program(sizes).variant_for(tokens).launches
        expected = h200().chain_us(
            [launch.kernel for launch in launches], sum(launch.pdl for launch in launches), sizes.named, tokens
        )
        assert one_rank_us(QWEN3, h200(), tokens, "forward") == pytest.approx(expected)
    shared = one_rank_us(Block(sizes, shared=2048), h200(), 4096, "forward")
    flops = 2 * 4096 * 2048 * 2048 * 3
    assert shared - expected > flops / 790e6
    assert one_rank_us(Block(sizes, shared=2048), h200(), 4096, "backward") > shared


def test_skew_costs():
    assert chosen(1024, 8, routing=zipf(128, 8)).best.us > 1.2 * chosen(1024, 8).best.us


@pytest.mark.parametrize("skewed", [False, True])
def test_4096_ranks_are_chosen_for_in_seconds(skewed: bool):
    block = Block(BlockSizes(512, 10, 2048, 512), shared=512)
    begun = time.perf_counter()
    for direction in ("forward", "backward"):
        choice = chosen(256, 4096, block, direction, NODES, **({"routing": zipf(512, 10)} if skewed else {}))
        assert choice.best.us > 0
    assert time.perf_counter() - begun < 5


def test_a_choice_for_two_ranks_takes_no_time_to_speak_of():
    """The compiler asks for each block; the programs of a block are kept."""
    chosen(4096, 2)
    threads = torch.get_num_threads()
    begun = time.process_time()
    chosen(4096, 2)
    assert (time.process_time() - begun) / threads < 2
