"""What must hold of an exchange that is replaced whole: nobody else reads its parts, and no other one is in between."""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Node

from moe_compiler.dag import collective_group
from moe_compiler.moe_ir import Match, Miss, op_name
from moe_compiler.passes.formulations.collectives import is_collective

__all__ = ["check_exchange"]


def check_exchange(
    match: Match,
    inside: frozenset[Node],
    order: dict[Node, int],
    leads_somewhere: Callable[[Node, frozenset[Node]], bool],
) -> None:
    """Raise Miss unless the collectives of a block are its exchange, and can be replaced at the place where they stand.

    Counts that came from other ranks, and lists of sizes, may not be read by others: the exchange that brings them is
    gone. A collective of the same group in between would change its place in the order of the group.
    """
    own = match.exchange.collectives if match.exchange is not None else ()
    for node in inside:
        if is_collective(node) and op_name(node) != "wait_tensor" and node not in own:
            raise Miss(f"{op_name(node)}, inside of the block, is no part of its exchange", node)
    if match.exchange is None:
        return
    for node in sorted(_brought(own, inside), key=order.__getitem__):
        for user in node.users:
            if node is not match.output and user not in inside and leads_somewhere(user, inside):
                raise Miss(
                    f"{node.name}, which the exchange brought, is also used by {user.name}",
                    user,
                    "compute what else is needed from values that are not exchanged",
                )
    places = [order[node] for node in own]
    for node, place in order.items():
        between = min(places) < place < max(places) and node not in own
        if between and collective_group(node) == match.exchange.group:
            raise Miss(
                f"{op_name(node)} of the same group stands between the way out and the way back",
                node,
                "move it ahead of the block or behind it, or give it a process group of its own",
            )


def _brought(own: tuple[Node, ...], inside: frozenset[Node]) -> set[Node]:
    """What a block makes of the values that its exchange brought."""
    found, pending = set(own), list(own)
    while pending:
        for user in pending.pop().users:
            if user in inside and user not in found:
                found.add(user)
                pending.append(user)
    return found
