"""Routing and traffic: how often experts are chosen, how many rows go where, which ranks are alike."""

from __future__ import annotations

import json
from itertools import combinations
from math import comb, prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_compiler.errors import UsageError
from moe_compiler.exchange_plan.links import Links
from moe_compiler.exchange_plan.routing import from_counts, routing_of, uniform, zipf
from moe_compiler.exchange_plan.traffic import Part, owners, traffic
from tests.moe_compiler.exchange_cases import MIXTRAL, group

NEAR = Links(400.0, 3.0)
NODES = Links(400.0, 3.0, node=4, node_gbs=50.0, node_latency_us=8.0)


@pytest.mark.parametrize(("experts", "k", "ranks"), [(8, 2, 2), (128, 8, 2), (128, 8, 8), (64, 6, 4)])
def test_uniform_routing_is_exact(experts: int, k: int, ranks: int):
    reach = uniform(experts, k).reach(owners(experts, ranks, "contiguous"), ranks)
    expected = 1 - comb(experts - experts // ranks, k) / comb(experts, k)
    assert reach.tolist() == pytest.approx([expected] * ranks, rel=1e-12)
    assert uniform(experts, k).chances().tolist() == pytest.approx([k / experts] * experts)


@pytest.mark.parametrize(("experts", "k", "others"), [(8, 2, 0.786), (64, 6, 0.988), (128, 4, 0.940), (128, 8, 0.997)])
def test_other_ranks_of_a_token_among_two(experts: int, k: int, others: float):
    reach = uniform(experts, k).reach(owners(experts, 2, "contiguous"), 2)
    assert float(reach.sum()) / 2 == pytest.approx(others, abs=5e-4)


def test_skewed_routing_is_that_of_all_sets():
    weights = [5.0, 1.0, 0.5, 2.0, 3.0, 0.25]
    owner = [0, 1, 1, 0, 2, 2]
    routing = from_counts("test", weights, 3)
    drawn = routing.weights.tolist()
    sets = {s: prod(drawn[e] for e in s) for s in combinations(range(6), 3)}
    whole = sum(sets.values())
    for expert in range(6):
        chance = sum(p for s, p in sets.items() if expert in s) / whole
        assert float(routing.chances()[expert]) == pytest.approx(chance, rel=1e-9)
    reach = routing.reach(torch.tensor(owner), 3)
    for rank in range(3):
        chance = sum(p for s, p in sets.items() if any(owner[e] == rank for e in s)) / whole
        assert float(reach[rank]) == pytest.approx(chance, rel=1e-9)


@given(st.lists(st.floats(0.01, 100.0), min_size=4, max_size=24), st.integers(1, 4))
def test_counts_come_back_as_chances(counts: list[float], k: int):
    chances = from_counts("test", counts, k).chances()
    assert float(chances.sum()) == pytest.approx(k, rel=1e-9)
    wanted = torch.tensor(counts, dtype=torch.float64) * k / sum(counts)
    if float(wanted.max()) < 0.99:  # otherwise an expert would be chosen by more tokens than there are
        assert torch.allclose(chances, wanted, atol=1e-4)
    assert bool((chances <= 1 + 1e-9).all())


def test_equal_counts_are_uniform_routing_to_the_last_digit():
    assert from_counts("test", [7.0] * 16, 4).weights.tolist() == uniform(16, 4).weights.tolist()


@pytest.mark.parametrize(
    ("counts", "text"),
    [([1.0, -1.0, 1.0], "negative"), ([1.0, 0.0, 0.0], "1 experts have a count"), ([1.0, float("nan"), 1.0], "not a")],
)
def test_counts_that_cannot_be(counts: list[float], text: str):
    with pytest.raises(ValueError, match=text):
        from_counts("test", counts, 2)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "neither uniform nor zipf"),
        ("[1, 2", "not JSON"),
        ("[1, 2]", "2 entries, not 4 numbers"),
        ('{"a": 1}', "dict, not 4 numbers"),
        ("[1, 2, true, 4]", "4 entries, not 4 numbers"),
        ("[1, 0, 0, 0]", "1 experts have a count"),
    ],
)
def test_a_file_that_is_no_routing(tmp_path, content: str | None, text: str):
    path = tmp_path / "counts.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=text) as raised:
        routing_of(str(path), 4, 2)
    assert raised.value.why


def test_a_file_of_counts(tmp_path):
    path = tmp_path / "counts.json"
    path.write_text(json.dumps([4, 1, 1, 2]))
    routing = routing_of(str(path), 4, 2)
    assert routing.name == "counts.json"
    assert routing.chances().tolist() == pytest.approx([1.0, 0.25, 0.25, 0.5], abs=1e-4)


def test_who_owns_what():
    assert owners(7, 3, "contiguous").tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert owners(7, 3, "round_robin").tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert owners(2, 4, "contiguous").tolist() == [0, 1]


def test_equal_ranks_are_one_class_and_unequal_ones_are_not():
    assert group([64] * 8, NEAR).members.tolist() == [8.0]
    assert sorted(group([64] * 7 + [0], NEAR).members.tolist()) == [1.0, 7.0]
    # 128 experts on 12 ranks: 8 ranks own 11 and 4 own 10, and these are a node of their own.
    assert sorted(group([64] * 12, NODES).members.tolist()) == [4.0, 8.0]
    assert group([64] * 8, NEAR, routing=zipf(128, 8)).members.tolist() == [1.0] * 8


TOKENS = st.lists(st.integers(0, 300), min_size=1, max_size=12).filter(any)


@given(TOKENS, st.booleans(), st.sampled_from(["contiguous", "round_robin"]), st.booleans())
def test_what_is_sent_is_received(tokens: list[int], skewed: bool, placement: str, nodes: bool):
    routing = (zipf if skewed else uniform)(8, 2)
    t = traffic(routing, tokens, NODES if nodes else NEAR, placement=placement)
    assert float(t.members.sum()) == len(tokens)
    assert float((t.members * t.tokens).sum()) == sum(tokens)

    def total(values: torch.Tensor) -> float:
        return float((values * t.members).sum())

    assert total(t.near) == pytest.approx(total(t.near_in), abs=1e-6)
    assert total(t.far) == pytest.approx(total(t.far_in), abs=1e-6)
    assert total(t.node_out / t.node_ranks) == pytest.approx(total(t.far), abs=1e-6)
    assert total(t.node_in / t.node_ranks) == pytest.approx(total(t.far_in), abs=1e-6)
    # Every row is computed where it arrives, and every choice by one rank.
    load = t.load(Part(""))
    assert total(load.rows) == pytest.approx(total(t.kept + t.near_in + t.far_in), abs=1e-6)
    assert total(load.pairs) == pytest.approx(2 * sum(tokens), rel=1e-9)


@given(TOKENS, st.booleans())
def test_parts_make_the_whole(tokens: list[int], skewed: bool):
    t = traffic((zipf if skewed else uniform)(8, 2), tokens, NEAR)
    whole, local, remote = t.load(Part("")), t.load(Part("l", "local")), t.load(Part("r", "remote"))
    chunk = t.load(Part("c", "all", 4))
    assert torch.allclose(whole.rows, local.rows + remote.rows)
    assert torch.allclose(whole.pairs, local.pairs + remote.pairs)
    assert torch.allclose(whole.pairs, 4 * chunk.pairs)
    assert bool((local.hit + remote.hit >= whole.hit - 1e-9).all())
    assert bool((4 * chunk.hit >= whole.hit - 1e-9).all())
    assert whole.slots == local.slots + remote.slots == len(tokens) * t.capacity
    assert t.capacity % 16 == 0 and t.capacity >= max(tokens)


def test_many_tokens_hit_every_expert_and_none_hit_none():
    t = group([100000, 100000], NEAR, block=MIXTRAL)
    assert t.load(Part("")).hit.tolist() == pytest.approx([4.0])
    t = group([0, 10], NEAR, block=MIXTRAL)
    local = t.load(Part("l", "local"))
    assert sorted(local.hit.tolist())[0] == 0.0


def test_ranks_without_experts_receive_nothing():
    t = group([16] * 12, NEAR, block=MIXTRAL)
    idle = t.experts == 0
    assert float(t.members[idle].sum()) == 4
    assert t.near_in[idle].tolist() == [0.0]
    assert bool((t.near[idle] > 0).all())
