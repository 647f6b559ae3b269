"""All-to-all exchanges that a model wrote: functional, autograd's and in-place spellings as one thing.

    sent -> all_to_all_single(sent, output sizes, input sizes, group) -> wait_tensor (once or twice) -> rows
    in place: the same, and copied into new memory behind that

The operators of both namespaces compute the same; torch 2.11 writes the one with autograd where the other is called.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from moe_compiler.moe_ir import Miss, op_name
from moe_compiler.passes.formulations.walk import (
    arg,
    dtype_of,
    is_fresh,
    is_op,
    live_users,
    reads_only_shape,
    require,
    same_shape,
    shape_of,
    strip_views,
)
from moe_compiler.runtime_kernels.exchange.groups import Group, GroupError, group

__all__ = ["AllToAll", "arrival", "group_of", "is_collective", "is_wait", "landed", "read_all_to_all"]

_SPACES = ("_c10d_functional", "_c10d_functional_autograd")


@dataclass(frozen=True)
class AllToAll:
    """node = what all ranks send to this one; sent: what this one sends.

    received, given: how many rows come from each rank, and go to each: numbers, or nodes that are read from the data.
    """

    node: Node
    sent: Node
    received: tuple[object, ...]
    given: tuple[object, ...]
    group: str


def is_collective(node: object) -> bool:
    """A collective that the model wrote, or the wait for one."""
    return isinstance(node, Node) and node.op == "call_function" and getattr(node.target, "namespace", "") in _SPACES


def is_wait(node: object) -> bool:
    """The wait for a collective."""
    return is_collective(node) and op_name(node) == "wait_tensor"  # type: ignore[arg-type]


def read_all_to_all(node: object) -> AllToAll | None:
    """`node` as an all-to-all exchange; None when it is something else, or its group is no name."""
    if not is_collective(node) or op_name(node) != "all_to_all_single":  # type: ignore[arg-type]
        return None
    assert isinstance(node, Node)
    sent, received, given, name = (
        arg(node, key) for key in ("input", "output_split_sizes", "input_split_sizes", "group_name")
    )
    if not isinstance(sent, Node) or not isinstance(name, str):
        return None
    return AllToAll(node, sent, tuple(received), tuple(given), name)


def group_of(exchange: AllToAll) -> Group:
    """The process group of an exchange; a Miss when this process has none of that name."""
    try:
        return group(exchange.group)
    except GroupError as error:
        raise Miss(str(error), exchange.node) from error


def _is_written_out(node: Node) -> bool:
    """A copy of a whole tensor into new memory of the same kind: the in-place spelling."""
    if not is_op(node, "copy", "copy_") or not is_fresh(strip_views(node.args[0])):  # type: ignore[arg-type]
        return False
    source = node.args[1]
    assert isinstance(source, Node)
    return dtype_of(source) == dtype_of(node) and same_shape(shape_of(source), shape_of(node))


def arrival(node: Node, what: str) -> AllToAll:
    """The exchange that `node` is the result of, behind its waits and views; a Miss when it is none."""
    current, waited = node, False
    while True:
        found = read_all_to_all(current)
        if found is not None:
            require(waited, f"{what} are read before they are waited for", current)
            return found
        if is_wait(current):
            current, waited = current.args[0], True  # type: ignore[assignment]
        elif _is_written_out(current):
            current = current.args[1]  # type: ignore[assignment]
        elif strip_views(current) is not current:
            current = strip_views(current)
        else:
            raise Miss(f"{what} come from {op_name(current)}, not from all_to_all_single", current)


def landed(exchange: AllToAll) -> Node:
    """The last name of what an exchange brought: behind its waits, and behind the copy of the in-place spelling.

    Each has one user up to there; a Miss names a user of what is not waited for yet, or is waited for twice over.
    """
    node = exchange.node
    while True:
        users = [user for user in live_users(node) if not reads_only_shape(user)]
        waits = [user for user in users if is_wait(user)]
        copies = [user for user in users if _is_written_out(user) and user.args[1] is node]
        if node is not exchange.node and not waits and not copies:
            return node
        onward = waits or copies
        other = next((user for user in users if user is not (onward[0] if onward else None)), None)
        require(
            len(onward) == 1 and other is None,
            f"what the exchange brings is also used by {op_name(other) if other is not None else 'nobody'}",
            other or node,
            "read what an exchange brings once, behind its wait",
        )
        node = onward[0]
