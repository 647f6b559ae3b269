"""The exchange of expert parallelism: owners, slots, messages, and the operators on several processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_compiler.runtime_kernels import register as _register  # noqa: F401 - defines torch.ops.moepdl
from moe_compiler.runtime_kernels.exchange.groups import GroupError
from moe_compiler.runtime_kernels.exchange.placement import (
    PLACEMENTS,
    PlacementError,
    check_placement,
    locate,
    owned,
    owner,
    token_slots,
)
from moe_compiler.runtime_kernels.exchange.reference import combined, dispatched, packed, token_at, views
from tests.ranks import of_scenario, run_ranks

WORKER = "tests.runtime_kernels.exchange_worker"
NAMES = (
    "contiguous",
    "round_robin",
    "bfloat16",
    "all_tokens_to_one_rank",
    "no_tokens_at_all",
    "no_expert_is_chosen",
    "repeated_bit_for_bit",
    "a_gradient_is_made_only_where_it_is_wanted",
    "no_second_derivative",
    "gathered",
    "ranks_that_read_different_experts_are_told",
    "too_many_tokens_are_told_on_every_rank",
    "different_exchanges_are_told_at_once",
    "a_late_rank_is_named_within_the_timeout",
)
sizes = st.tuples(st.integers(1, 9), st.integers(0, 30)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(sizes, st.sampled_from(PLACEMENTS))
def test_each_expert_has_one_owner_and_shares_differ_by_one_at_most(size, placement):
    ranks, experts = size
    shares = [owned(experts, ranks, rank, placement) for rank in range(ranks)]
    assert sorted(e for share in shares for e in share) == list(range(experts))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    ids = torch.arange(-2, experts + 2)
    owners, local = locate(ids, experts, ranks, placement)
    for expert, rank, place in zip(ids.tolist(), owners.tolist(), local.tolist(), strict=True):
        if not 0 <= expert < experts:
            assert rank == ranks
        else:
            assert shares[rank][place] == expert and owner(expert, experts, ranks, placement) == rank


def test_uneven_contiguous_shares_and_round_robin():
    assert [list(owned(10, 4, r, "contiguous")) for r in range(4)] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    assert [list(owned(5, 2, r, "round_robin")) for r in range(2)] == [[0, 2, 4], [1, 3]]


def test_what_cannot_be_placed_says_why():
    with pytest.raises(PlacementError, match="4 experts cannot be spread over 8 ranks"):
        check_placement(4, 8, "contiguous")
    with pytest.raises(PlacementError, match="contiguous, round_robin"):
        check_placement(8, 4, "nearest")


def test_a_token_has_one_slot_a_rank_in_token_order():
    ids = torch.tensor([[0, 1], [3, 0], [2, 3], [9, -1]])
    assert token_slots(ids, 4, 2, "contiguous").tolist() == [[0, -1], [1, 0], [-1, 1], [-1, -1]]
    assert token_at(token_slots(ids, 4, 2, "contiguous"), 3).tolist() == [[0, 1, 4], [1, 2, 4]]


def test_what_is_sent_names_local_experts_and_leaves_out_those_of_other_ranks():
    ids = torch.tensor([[0, 3], [4, 2]])
    x, weights = torch.arange(4.0).view(2, 2), torch.tensor([[0.5, 0.25], [0.125, 2.0]])
    slots = token_slots(ids, 5, 2, "contiguous")  # rank 0 owns 0 1 2, rank 1 owns 3 4
    rows, local, scores = dispatched(x, ids, weights, slots, 5, "contiguous", 3)
    assert rows[0].tolist() == [[0, 1], [2, 3], [0, 0]] and rows[1].tolist() == [[0, 1], [2, 3], [0, 0]]
    assert local[0].tolist() == [[0, 3], [3, 2], [3, 3]] and local[1].tolist() == [[2, 0], [1, 2], [2, 2]]
    assert scores[0].tolist() == [[0.5, 0], [0, 2], [0, 0]] and scores[1].tolist() == [[0, 0.25], [0.125, 0], [0, 0]]


def test_sums_ignore_what_stands_in_unused_slots():
    slots = torch.tensor([[0, -1], [-1, -1], [1, 0]], dtype=torch.int32)
    out = torch.full((2, 2, 1), float("nan"))
    out[0, 0], out[0, 1], out[1, 0] = 1, 2, 4
    assert combined(out, slots, torch.float32).tolist() == [[1], [0], [6]]


def test_sums_are_rounded_once():
    slots = torch.zeros((1, 3), dtype=torch.int32)
    out = torch.tensor([1.0, 2.0**-8, 2.0**-8]).view(3, 1, 1).bfloat16()
    assert combined(out, slots, torch.bfloat16).item() == 1 + 2.0**-7


@pytest.mark.parametrize("shapes", [[(3, 5), (3,), (0,)], [(1, 1)], [(0, 4)]])
def test_a_message_gives_back_its_parts(shapes):
    dtypes = [torch.bfloat16, torch.int32, torch.float64]
    tensors = [torch.arange(2 * max(1, torch.Size(s).numel())).to(d)[: 2 * torch.Size(s).numel()].view(2, *s)
               for s, d in zip(shapes, dtypes, strict=False)]  # fmt: skip
    message, parts = packed(tensors)
    assert message.dtype == torch.uint8 and message.shape[1] % 16 == 0
    for view, tensor in zip(views(message, parts), tensors, strict=True):
        assert torch.equal(view, tensor)


def test_an_operator_without_its_group_says_so():
    x, ids = torch.zeros(2, 4), torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(GroupError, match="there is no process group 'gone'"):
        torch.ops.moepdl.ep_dispatch(x, ids, torch.ones(2, 1), "gone", 4, "contiguous", 16)


def test_a_group_is_known_by_its_name_and_has_a_store(tmp_path):
    """The private names of torch.distributed that the exchange relies on."""
    import torch.distributed as dist

    from moe_compiler.runtime_kernels.exchange.groups import group

    if not dist.is_gloo_available():
        pytest.skip("this torch has no gloo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        known = group(dist.group.WORLD.group_name)
        assert (known.rank, known.ranks, known.backend, known.fake) == (0, 1, "gloo", False)
        known.store.set("a", "b")
        assert known.store.check(["a"]) and known.store.get("a") == b"b"
        assert group(known.name) is known
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Three ranks share ten experts: 4, 3 and 3."""
    return run_ranks(WORKER, 3, tmp_path_factory.mktemp("three"), 120)


@pytest.mark.parametrize("name", NAMES)
def test_three_ranks(three, name):
    of_scenario(three, name)


def test_the_survivors_name_a_dead_rank(three):
    texts = of_scenario([three[0], three[2]], "a_dead_rank_is_named_within_the_timeout")
    assert all("rank 1" in text and "layer 6" in text and "dispatch" in text for text in texts)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 8])
def test_another_number_of_ranks(ranks, tmp_path):
    found = run_ranks(WORKER, ranks, tmp_path, 240)
    for name in NAMES if ranks > 1 else NAMES[:10]:
        of_scenario(found, name)
