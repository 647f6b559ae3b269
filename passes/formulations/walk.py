"""Walking a captured graph: what a matcher may look through, and how it asks for an operator and its arguments.

Everything here answers about one node or one short path and never changes the graph. A matcher that needs a fact
calls `require`, which raises Miss with the reader's sentence when the fact does not hold.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch.fx import Node

from moe_compiler.aliasing import alias_root, aliases_argument, has_effect, mutated_arguments
from moe_compiler.moe_ir import Miss, name_of, op_name, size_expr

__all__ = [
    "arg",
    "aten_name",
    "contains",
    "dtype_of",
    "elements_of",
    "filled_with",
    "folded",
    "is_cast",
    "is_fresh",
    "is_index_cast",
    "is_op",
    "is_written",
    "is_zeros",
    "item_of",
    "live_users",
    "matrix_behind",
    "number",
    "only_user",
    "producer",
    "rank_of",
    "read_by",
    "reads_only_shape",
    "require",
    "row_source",
    "row_views",
    "same_shape",
    "same_size",
    "same_value",
    "shape_of",
    "strip",
    "strip_casts",
    "strip_ids",
    "strip_views",
    "strip_views_casts",
    "swaps_last_two",
    "users_through",
    "view_or_cast",
    "widens",
    "without_units",
]

# Operators that keep the row-major order of the elements.
VIEWS = frozenset(
    {"view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten", "contiguous", "clone", "alias"}
    | {"view_as", "reshape_as"}
)
CASTS = frozenset({"to", "_to_copy", "type_as"})
# Those of both that may be memory of their own.
_COPIES = frozenset({"clone", "contiguous", "reshape", "reshape_as", "flatten"}) | CASTS
# Called twice they give two values: random numbers, and memory that nobody has written yet.
_NEW_VALUES = (
    "empty",
    "empty_like",
    "empty_permuted",
    "new_empty",
    "rand",
    "rand_like",
    "randn",
    "randn_like",
    "randint",
    "bernoulli",
    "dropout",
    "multinomial",
    "randperm",
    "normal",
)
# Only the shape, dtype and device of the argument are read, or of the arguments but the first.
_READS_NO_VALUES = (
    "zeros_like",
    "empty_like",
    "full_like",
    "ones_like",
    "new_zeros",
    "new_empty",
    "new_full",
    "new_ones",
)
# Operators that tell or take a size of their first argument.
_READS_A_SIZE = ("sym_size", "sym_numel", *_READS_NO_VALUES)
_READS_THE_FIRST = ("type_as", "view_as", "reshape_as", "expand_as")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INDEX_DTYPES = (torch.int32, torch.int64)


def require(holds: object, reason: str, node: Node | None = None, hint: str = "") -> None:
    """Raise Miss unless `holds`."""
    if not holds:
        raise Miss(reason, node, hint)


@lru_cache(maxsize=4096)
def _aten_name_of(target: Any) -> str:
    return name_of(target) if getattr(target, "namespace", "") == "aten" else ""


def aten_name(node: object) -> str:
    """The name of the ATen operator that this node calls, without its overload; "" when it calls none."""
    return _aten_name_of(node.target) if isinstance(node, Node) and node.op == "call_function" else ""


def is_op(node: object, *names: str) -> bool:
    """Is this a call of an ATen operator (any overload) with one of these names?"""
    # Asked some fifty times about every node: what `aten_name` would answer, without calling it.
    return isinstance(node, Node) and node.op == "call_function" and _aten_name_of(node.target) in names


def arg(node: Node, name: str) -> Any:
    """An argument by its schema name, whether it was given by position, by keyword, or left at its default."""
    schema = node.target._schema
    for position, argument in enumerate(schema.arguments):
        if argument.name == name:
            if position < len(node.args):
                return node.args[position]
            if name in node.kwargs:
                return node.kwargs[name]
            return argument.default_value if argument.has_default_value() else None
    raise KeyError(f"{node.target} has no argument {name!r}")


def shape_of(node: Node) -> tuple[sympy.Expr, ...]:
    """The sizes of a node's tensor as sympy expressions; () when it is not a tensor."""
    value = node.meta.get("val")
    return tuple(size_expr(size) for size in value.shape) if isinstance(value, torch.Tensor) else ()


def rank_of(node: Node) -> int:
    """The number of dimensions of a node's tensor; 0 when it is not a tensor."""
    value = node.meta.get("val")
    return value.dim() if isinstance(value, torch.Tensor) else 0


def dtype_of(node: Node) -> torch.dtype:
    """The dtype of a node's tensor; raises Miss when it has none."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise Miss("is not a tensor", node)
    return value.dtype


def same_size(a: sympy.Expr, b: sympy.Expr) -> bool:
    """Are two sizes equal for every value of their symbols?"""
    return sympy.expand(a - b) == 0


def contains(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Does one floating dtype hold every value of another? Of fp16 and bf16 neither does."""
    a, b = torch.finfo(wide), torch.finfo(narrow)
    return wide == narrow or (a.eps <= b.eps and a.max >= b.max and a.tiny <= b.tiny)


def _is_conversion(node: Node) -> bool:
    if not is_op(node, *CASTS) or not isinstance(node.args[0], Node) or _is_written_copy(node):
        return False
    before, after = node.args[0].meta.get("val"), node.meta.get("val")
    return (
        isinstance(before, torch.Tensor)
        and isinstance(after, torch.Tensor)
        and before.device == after.device
        and before.dtype in _FLOATS
        and after.dtype in _FLOATS
    )


def widens(node: Node) -> bool:
    """A conversion between floating dtypes that changes no value."""
    return _is_conversion(node) and contains(dtype_of(node), dtype_of(node.args[0]))  # type: ignore[arg-type]


def is_cast(node: Node) -> bool:
    """A conversion between floating dtypes on one device that a matcher may look through.

    One that widens what was narrowed just before is none: the two together round (fake quantisation). Narrowing alone
    is one; the finder checks that nothing is narrowed beyond the dtype that the block computes in.
    """
    if not _is_conversion(node) or _is_written_copy(node):
        return False
    source = strip_views(node.args[0])  # type: ignore[arg-type]
    rounded = is_op(source, *CASTS) and not widens(source)
    return not rounded or _dtype(node) == _dtype(source) or not widens(node)


def is_index_cast(node: Node) -> bool:
    """A conversion between the integer dtypes that expert ids have."""
    if not is_op(node, *CASTS) or not isinstance(node.args[0], Node) or _is_written_copy(node):
        return False
    before, after = node.args[0].meta.get("val"), node.meta.get("val")
    return getattr(before, "dtype", None) in _INDEX_DTYPES and getattr(after, "dtype", None) in _INDEX_DTYPES


def is_zeros(node: object) -> bool:
    """A new tensor of zeros, also one that takes its shape from another and fills it."""
    if is_op(node, "full", "full_like", "new_full"):
        return arg(node, "fill_value") == 0
    if is_op(node, "fill"):
        return arg(node, "value") == 0
    return is_op(node, "zeros", "zeros_like", "new_zeros", "zero")


def is_fresh(node: object) -> bool:
    """New memory for values that are all written later; torch.export writes empty_like as empty_permuted."""
    return is_op(node, "empty_like", "empty", "new_empty", "empty_permuted") or is_zeros(node)


def filled_with(value: object) -> float | None:
    """A constant, written as a number or as a new tensor of one value; else None."""
    if isinstance(value, Node):
        if is_zeros(value):
            return 0.0
        if is_op(value, "ones", "ones_like", "new_ones"):
            return 1.0
        if is_op(value, "full", "full_like", "new_full", "scalar_tensor"):
            value = arg(value, "s" if is_op(value, "scalar_tensor") else "fill_value")
    return float(value) if isinstance(value, (int, float)) else None


def item_of(node: Node, index: int, *names: str) -> Node | None:
    """The operator called one of `names` whose result number `index` this node is, else None."""
    source = node.args[0] if node.op == "call_function" and op_name(node) == "getitem" else None
    return source if isinstance(source, Node) and node.args[1] == index and is_op(source, *names) else None


def swaps_last_two(node: object) -> bool:
    """A transpose of the last two dimensions, in any spelling."""
    if not is_op(node, "transpose", "swapaxes", "swapdims", "permute", "t", "mT", "numpy_T"):
        return False
    assert isinstance(node, Node)
    rank = len(shape_of(node))
    if op_name(node) in ("t", "numpy_T"):
        return rank == 2
    if op_name(node) == "mT":
        return True
    if op_name(node) == "permute":
        dims = [d % rank for d in node.args[1]]
        return dims == [*range(rank - 2), rank - 1, rank - 2]
    return rank >= 2 and {d % rank for d in node.args[1:3]} == {rank - 2, rank - 1}


def _is_view(node: Node) -> bool:
    # view also has an overload that reads the same bytes as another dtype.
    same = is_op(node, *VIEWS) and isinstance(node.args[0], Node) and _dtype(node) == _dtype(node.args[0])
    return same and not _is_written_copy(node)


def _dtype(node: Node) -> torch.dtype | None:
    return getattr(node.meta.get("val"), "dtype", None)


def strip(node: Node, through: Callable[[Node], bool]) -> Node:
    """Walk towards the producer as long as `through` holds."""
    while through(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def is_written(node: Node) -> bool:
    """Does an in-place operator write into the memory of `node`?"""
    return _writes_behind(alias_root(node))


def _is_written_copy(node: Node) -> bool:
    """Does `node` (perhaps) copy its argument, and is the copy written to? It then holds other values than that."""
    return is_op(node, *_COPIES) and _writes_behind(node)


def _writes_behind(root: Node) -> bool:
    """Does an in-place operator write into `root` or a view of it?"""
    pending, seen = [root], {root}
    while pending:
        alias = pending.pop()
        for user in alias.users:
            if alias in mutated_arguments(user):
                return True
            if alias in aliases_argument(user) and user not in seen:
                seen.add(user)
                pending.append(user)
    return False


def row_views(node: Node) -> bool:
    """A view that keeps the order of the elements and the last dimension: the same rows, counted another way."""
    return _is_view(node) and shape_of(node)[-1:] == shape_of(node.args[0])[-1:] != ()  # type: ignore[arg-type]


def row_source(node: Node) -> Node:
    """The node farthest behind views whose rows, the last dimension, are those of `node`, one by one.

    Between the two there may be views of other rows: reshape(-1).view(shape), unsqueeze(-1).squeeze(-1).
    """
    found, size = node, shape_of(node)[-1:]
    while _is_view(node):
        node = node.args[0]  # type: ignore[assignment]
        if shape_of(node)[-1:] == size != ():
            found = node
    return found


def folded(shape: tuple[sympy.Expr, ...], rank: int) -> tuple[sympy.Expr, ...]:
    """A shape with its dimensions in front multiplied into one, so that there are `rank`; a smaller one unchanged."""
    extra = len(shape) - rank
    return shape if extra <= 0 else (elements_of(shape[: extra + 1]), *shape[extra + 1 :])


def strip_views(node: Node) -> Node:
    """The node behind views that keep the order of the elements."""
    return strip(node, _is_view)


def strip_casts(node: Node) -> Node:
    """The node behind floating casts."""
    return strip(node, is_cast)


def strip_views_casts(node: Node) -> Node:
    """The node behind views and floating casts."""
    return strip(node, lambda n: _is_view(n) or is_cast(n))


def strip_ids(node: Node) -> Node:
    """The node behind views and integer conversions of expert ids."""
    return strip(node, lambda n: _is_view(n) or is_index_cast(n))


def without_units(shape: tuple[sympy.Expr, ...]) -> tuple[sympy.Expr, ...]:
    """A shape without its dimensions of size 1."""
    return tuple(size for size in shape if size != 1)


def same_shape(a: tuple[sympy.Expr, ...], b: tuple[sympy.Expr, ...]) -> bool:
    """Are two shapes equal for every value of their symbols?"""
    return len(a) == len(b) and all(same_size(x, y) for x, y in zip(a, b, strict=True))


def elements_of(shape: tuple[sympy.Expr, ...]) -> sympy.Expr:
    """The number of elements of a shape."""
    return sympy.Mul(*shape)


def matrix_behind(node: Node, shape: tuple[sympy.Expr, ...], through: Callable[[Node], bool] = _is_view) -> Node | None:
    """The node nearest to `node`, seen through `through`, that has this shape; None when there is none."""
    while not same_shape(shape_of(node), shape):
        if not through(node) or not isinstance(node.args[0], Node):
            return None
        node = node.args[0]
    return node


def same_value(a: object, b: object, depth: int = 6) -> bool:
    """Do two arguments hold the same value: one node, or the same pure operator on the same values, written twice?"""
    if isinstance(a, Node) and isinstance(b, Node):
        if a is b:
            return True
        pure = a.op == b.op == "call_function" and not has_effect(a) and a.target is b.target
        if not pure or depth == 0 or is_op(a, *_NEW_VALUES) or a.kwargs.keys() != b.kwargs.keys():
            return False
        pairs = [*zip(a.args, b.args, strict=False), *((a.kwargs[key], b.kwargs[key]) for key in a.kwargs)]
        return len(a.args) == len(b.args) and all(same_value(x, y, depth - 1) for x, y in pairs)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same_value(x, y, depth) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


def number(value: object) -> float | None:
    """A number, also one that Dynamo made symbolic (a float attribute of a module, under dynamic=True); else None.

    Asking for the value of a symbolic one makes it a guard: with another value the code is compiled again. So one that
    is computed from sizes is no number: it would be another for each.
    """
    if isinstance(value, Node):
        value = value.meta.get("val")
        if not isinstance(value, torch.SymFloat) or not value.node.has_hint():
            return None
        if any(symbol.is_integer for symbol in value.node.expr.free_symbols):
            return None
    return None if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymFloat)) else float(value)


def producer(node: object, reason: str) -> Node:
    """`node` itself when it is a graph node, else a Miss."""
    if not isinstance(node, Node):
        raise Miss(reason)
    return node


def reads_only_shape(node: Node) -> bool:
    """Does an operator take nothing but sizes, dtype or device from its first argument?"""
    return is_op(node, *_READS_A_SIZE)


def read_by(node: Node) -> list[Node]:
    """The nodes whose values a node reads; of others it takes the shape, dtype or device alone."""
    if is_op(node, *_READS_NO_VALUES):
        return []
    return [node.args[0]] if is_op(node, *_READS_THE_FIRST) else node.all_input_nodes  # type: ignore[list-item]


def live_users(node: Node) -> list[Node]:
    """The users of a node that lead somewhere: dead code left by an earlier rewrite does not count."""
    return [user for user in node.users if user.users or user.op == "output" or has_effect(user)]


def only_user(node: Node, what: str) -> Node:
    """The single user of a node; Miss names `what` when it has none or several."""
    users = live_users(node)
    if len(users) != 1:
        raise Miss(f"{what} has {len(users)} users where one was expected", node)
    return users[0]


def users_through(node: Node, through: Callable[[Node], bool]) -> list[Node]:
    """All users of a node, seeing through nodes for which `through` holds; in graph order."""
    found: dict[Node, None] = {}
    pending = list(node.users)
    while pending:
        user = pending.pop(0)
        if through(user):
            pending.extend(user.users)
        else:
            found.setdefault(user)
    return list(found)


def view_or_widening(node: Node) -> bool:
    """Views that keep the order of the elements, and casts that change no value."""
    return _is_view(node) or widens(node)


def view_or_cast(node: Node) -> bool:
    """Views that keep the order of the elements, and floating casts."""
    return _is_view(node) or is_cast(node)
