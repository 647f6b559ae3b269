"""Python's syntax tree, asked about names: what a statement binds, what it reads, and in which order.

`loop_effects` reads loops with it. Functions and classes that are defined inside of a body are not entered.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

__all__ = ["bound", "called", "events", "loads", "names", "operand", "own_nodes", "root_name", "statements"]


def root_name(node: ast.expr) -> str:
    """The name that an expression starts from: `a` of a[i].b.c(), or of torch.any(a); "" for none."""
    while True:
        if isinstance(node, (ast.Subscript, ast.Attribute, ast.Starred)):
            node = node.value
        elif isinstance(node, ast.Call):
            over = operand(node)
            if over is None:
                return ""
            node = over
        else:
            return node.id if isinstance(node, ast.Name) else ""


def called(call: ast.Call) -> str:
    function = call.func
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def operand(call: ast.Call) -> ast.expr | None:
    """What a call works on: the object of a method, the first argument of a function (torch.any, len)."""
    function = call.func
    if isinstance(function, ast.Attribute) and root_name(function.value) not in ("torch", "F", "np"):
        return function.value
    return call.args[0] if call.args else None


def names(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def loads(node: ast.AST) -> set[str]:
    return {name for name, kind, _ in events([node]) if kind == "load"}


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements and those inside of them, in order; functions and classes that are defined there are not entered."""
    for statement in body:
        yield statement
        if not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            for field in ("body", "orelse", "finalbody"):
                yield from statements(getattr(statement, field, None) or [])
            for handler in getattr(statement, "handlers", ()):
                yield from statements(handler.body)


def own_nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    """The nodes of a statement without those of the statements inside of it."""
    yield statement
    pending = list(ast.iter_child_nodes(statement))
    while pending:
        node = pending.pop(0)
        if not isinstance(node, (ast.stmt, ast.ExceptHandler)):
            yield node
            pending += ast.iter_child_nodes(node)


def bound(statement: ast.stmt) -> set[str]:
    """The plain names that a statement binds."""
    return {
        node.id
        for node in own_nodes(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del))
    }


def events(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str, ast.expr]]:
    """(name, "load" or "store", node), in the order in which they happen; names of comprehensions are their own."""
    for node in nodes:
        if isinstance(node, ast.Name):
            yield node.id, "load" if isinstance(node.ctx, ast.Load) else "store", node
        elif isinstance(node, ast.AugAssign):
            yield from events([node.value])
            for inner in ast.walk(node.target):
                if isinstance(inner, ast.Name):
                    yield inner.id, "load", inner
            yield from events([node.target])
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from events([*([node.value] if node.value is not None else []), *targets])
        elif isinstance(node, ast.For):
            yield from events([node.iter, node.target, *node.body, *node.orelse])
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            own = set().union(*(names(part.target) for part in node.generators))
            yield from (event for event in events(ast.iter_child_nodes(node)) if event[0] not in own)
        elif not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Lambda)):
            yield from events(ast.iter_child_nodes(node))
