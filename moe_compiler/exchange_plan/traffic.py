"""What each rank of a group sends, receives and computes, in rows; ranks with equal numbers are one class.

Every row is a token on its way to a rank where at least one of its experts lives: it goes there once. Numbers are
expectations under the routing; ranks of one group differ in their tokens, in the experts they own and in where they
stand, so uniform routing over equal ranks is one class however many ranks there are, and under skew every rank is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_compiler.exchange_plan.links import Links
from moe_compiler.exchange_plan.routing import Routing

__all__ = ["CAPACITY_UNIT", "Load", "Part", "Traffic", "owners", "traffic"]

# The number of slots that a rank keeps for another is a multiple of this.
CAPACITY_UNIT = 16
# Digits of a number of rows by which two ranks differ.
_DIGITS = 6


@dataclass(frozen=True)
class Part:
    """Some of the rows of every rank. source: "all", "local" (the rank's own tokens) or "remote" (the others').

    of: in how many chunks the tokens are cut, of which this is one.
    """

    name: str
    source: str = "all"
    of: int = 1


@dataclass(frozen=True)
class Load:
    """What launches of each class work on, float64 [classes]; slots is a number, the same on every rank.

    slots: rows with those that are unused.  rows: those with a token.  pairs: of a row and an expert of this rank.
    hit: experts of this rank that get a row.  experts: that it owns.
    """

    slots: float
    rows: Tensor
    pairs: Tensor
    hit: Tensor
    experts: Tensor


@dataclass(frozen=True)
class Traffic:
    """A group of ranks. Tensors are float64 [classes] unless said otherwise; rows are of all tokens, for one exchange.

    ranks, k, capacity  of the group; capacity: slots that a rank keeps for each other one
    members             ranks of a class;  rank_class: int64 [ranks], the class of each
    tokens, experts     of a rank
    kept                rows that stay with their rank
    near, far           rows that it sends to others of its node and to other nodes;  near_in, far_in: that it gets
    node_out, node_in   rows that its whole node sends to other nodes and gets
    near_peers          other ranks of its node;  far_peers: ranks of other nodes;  node_ranks: ranks of its node
    chances             [classes, most experts of a rank], how likely a token is to choose each; 0 past `experts`
    """

    ranks: int
    k: int
    capacity: int
    total_tokens: float
    reach_sum: float
    members: Tensor
    rank_class: Tensor
    tokens: Tensor
    experts: Tensor
    reach: Tensor
    kept: Tensor
    near: Tensor
    far: Tensor
    near_in: Tensor
    far_in: Tensor
    node_out: Tensor
    node_in: Tensor
    near_peers: Tensor
    far_peers: Tensor
    node_ranks: Tensor
    chances: Tensor

    def slots(self, part: Part) -> int:
        """Slots of a part, used or not."""
        own = -(-self.capacity // part.of)
        return own * {"all": self.ranks, "local": 1, "remote": self.ranks - 1}[part.source]

    def load(self, part: Part) -> Load:
        """What a part's launches work on."""
        seen = {
            "all": torch.full_like(self.tokens, self.total_tokens),
            "local": self.tokens,
            "remote": self.total_tokens - self.tokens,
        }[part.source] / part.of
        hit = (1.0 - (1.0 - self.chances) ** seen[:, None]).sum(1)
        return Load(float(self.slots(part)), self.reach * seen, self.chances.sum(1) * seen, hit, self.experts)


def owners(experts: int, ranks: int, placement: str) -> Tensor:
    """The rank of each expert, int64 [E].

    "contiguous": neighbours, the first E % R ranks own one more; "round_robin": expert e is of rank e % R.
    """
    if placement == "round_robin":
        return torch.arange(experts) % ranks
    each, more = divmod(experts, ranks)
    counts = torch.full((ranks,), each, dtype=torch.int64)
    counts[:more] += 1
    return torch.repeat_interleave(torch.arange(ranks), counts)


def traffic(
    routing: Routing,
    tokens: Sequence[int],
    links: Links,
    *,
    placement: str = "contiguous",
    capacity: int = 0,
    collapse: bool = True,
) -> Traffic:
    """The traffic of len(tokens) ranks with so many tokens each.

    capacity: 0 for the largest of tokens, rounded up to a multiple of 16. collapse: equal ranks become one class.
    """
    ranks = len(tokens)
    own = torch.tensor(list(tokens), dtype=torch.float64)
    owner = owners(routing.experts, ranks, placement)
    reach = routing.reach(owner, ranks)
    node_of = torch.arange(ranks) // (links.node or ranks)

    def of_node(values: Tensor) -> Tensor:
        nodes = links.nodes(ranks)
        return torch.zeros(nodes, dtype=torch.float64).index_add_(0, node_of, values)[node_of]

    node_tokens, node_reach = of_node(own), of_node(reach)
    all_tokens, all_reach = float(own.sum()), float(reach.sum())
    node_ranks = of_node(torch.ones_like(own))
    columns = {
        "tokens": own,
        "experts": torch.bincount(owner, minlength=ranks).double(),
        "reach": reach,
        "kept": own * reach,
        "near": own * (node_reach - reach),
        "far": own * (all_reach - node_reach),
        "near_in": reach * (node_tokens - own),
        "far_in": reach * (all_tokens - node_tokens),
        "node_out": node_tokens * (all_reach - node_reach),
        "node_in": node_reach * (all_tokens - node_tokens),
        "near_peers": node_ranks - 1,
        "far_peers": ranks - node_ranks,
        "node_ranks": node_ranks,
    }
    # The difference of two equal sums may be less than nothing by its last digit.
    columns = {name: values.clamp(min=0.0) for name, values in columns.items()}
    chances = _chances_by_rank(routing, owner, ranks)
    table = torch.cat([torch.stack(list(columns.values()), 1), chances], 1)
    first, rank_class, members = _classes(table) if collapse else (slice(None), torch.arange(ranks), None)
    if capacity == 0:
        capacity = -(-max(tokens, default=0) // CAPACITY_UNIT) * CAPACITY_UNIT
    return Traffic(
        ranks=ranks,
        k=routing.k,
        capacity=capacity,
        total_tokens=all_tokens,
        reach_sum=all_reach,
        members=torch.ones_like(own) if members is None else members,
        rank_class=rank_class,
        chances=chances[first],
        **{name: values[first] for name, values in columns.items()},
    )


def _chances_by_rank(routing: Routing, owner: Tensor, ranks: int) -> Tensor:
    """Of each rank, the chances of its experts, the likeliest first: [ranks, most experts of a rank]."""
    order = torch.argsort(owner, stable=True)
    counts = torch.bincount(owner, minlength=ranks)
    starts = counts.cumsum(0) - counts
    found = torch.zeros(ranks, max(int(counts.max()), 1), dtype=torch.float64)
    found[owner[order], torch.arange(owner.numel()) - starts[owner[order]]] = routing.chances()[order]
    return found.sort(1, descending=True).values


def _classes(table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(first rank of each class, class of each rank, ranks of each class) of rows that are equal but for rounding."""
    _, rank_class, members = torch.unique(
        torch.round(table, decimals=_DIGITS), dim=0, return_inverse=True, return_counts=True
    )
    ranks = torch.arange(table.shape[0] - 1, -1, -1)
    first = torch.zeros(members.numel(), dtype=torch.int64)
    first[rank_class[ranks]] = ranks
    return first, rank_class, members.double()
