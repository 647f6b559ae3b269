"""The start of a router whose end is no rule: what is known up to some step is raised, the steps behind it stay.

    w, i = topk(softmax(l));  w = w / w.norm(dim=-1, keepdim=True)          another norm than the sum
    w, i = topk(softmax(l));  w = w.masked_fill(i == E, 0); i = i.masked_fill(i == E, 0)      a class for no expert

The operator then gives what the steps that stay read. Their order of a token's choices must be the source's own, so an
unsorted choice has no such start.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch.fx import Node

from moe_compiler.moe_ir import Miss
from moe_compiler.passes.formulations.router import Router, match_router
from moe_compiler.passes.formulations.topk import read_selection
from moe_compiler.passes.formulations.walk import elements_of, read_by, same_size, shape_of

__all__ = ["match_start"]

_STEPS = 24  # nodes behind weights and behind ids that are looked at


def match_start(weights: Node, ids: Node, inside: Collection[Node], check: Callable[[Router], None]) -> Router:
    """The router up to the last step at which it is a rule and passes `check`; raises Miss when there is none."""
    chosen = _nearest(ids, ids, read_selection)
    if chosen is None:
        raise Miss("nothing behind the ids is a top-k of as many experts a token", ids)

    def read(node: Node) -> Router:
        router = match_router(node, chosen, inside)
        check(router)
        return router

    known = _nearest(weights, ids, read)
    if known is None:
        raise Miss("nothing behind the weights is a rule of scores", weights)
    return match_router(known, chosen, inside)


def _nearest(node: Node, like: Node, read: Callable[[Node], object]) -> Node | None:
    """The nearest node that `read` does not miss at, of one number for each of the choices `like`."""
    pairs = elements_of(shape_of(like))
    pending, seen = [node], {node}
    while pending and len(seen) < _STEPS:
        candidate = pending.pop(0)
        if same_size(elements_of(shape_of(candidate)), pairs) and shape_of(candidate):
            try:
                read(candidate)
            except Miss:
                pass
            else:
                return candidate
        fresh = [source for source in read_by(candidate) if source not in seen]
        seen.update(fresh)
        pending.extend(fresh)
    return None
