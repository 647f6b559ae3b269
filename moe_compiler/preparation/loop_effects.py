"""What a loop over experts does besides adding up what they give: read off its source, for nothing of it may be lost.

A loop can be replaced, or run over more experts, only where an expert without rows changes nothing. So three things
matter. A branch that asks exactly "are there no rows" may go; every other one means something (a capacity, a case for
many rows). A value that one expert hands to the next may not, but for the sum itself and for the bounds of slices that
run along sorted rows. What is written elsewhere (a counter, a list, an attribute) stays only where rows alone decide
it.

Comparing numbers does not replace this: the inputs of a comparison need not reach a capacity.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from moe_compiler.preparation.name_flow import (
    bound,
    called,
    events,
    loads,
    names,
    operand,
    own_nodes,
    root_name,
    statements,
)

__all__ = ["Effect", "LoopReading", "written_elsewhere"]

_COUNTING = {"numel", "nelement"}
_CHOOSING = {"one_hot", "eq", "ne", "isin", "nonzero", "bool"}
_SKIPS = (ast.Continue, ast.Pass)


@dataclass(frozen=True)
class Effect:
    """Something that a loop does and that would be lost: the line, and a sentence about it."""

    line: int
    what: str


class LoopReading:
    """One `for` statement of a function: which of its branches are about rows, and what it does besides the sum."""

    def __init__(self, function: ast.FunctionDef, loop: ast.For, receiver: str) -> None:
        self.loop, self.receiver = loop, receiver
        self.assigned = {name for name, kind, _ in events(loop.body) if kind == "store"} | names(loop.target)
        self.numbers = _numbers(loop)
        self.constant = _constant(function, receiver) - self.assigned
        self.choices = _choices(function)
        self.counts = self._counts()
        self.bounds = self._bounds()
        own = {id(node) for node in ast.walk(loop)}
        order = [event for event in events(function.body) if id(event[2]) not in own]
        behind: dict[str, str] = {}
        for name, kind, node in order:
            if node.lineno > (loop.end_lineno or loop.lineno):
                behind.setdefault(name, kind)
        self.read_behind = {name for name, kind in behind.items() if kind == "load"}

    # Branches

    def without_row_branches(self, body: list[ast.stmt]) -> tuple[list[ast.stmt], bool]:
        """The statements without the branches that are only about rows, and whether there was one; the others stay."""
        flat: list[ast.stmt] = []
        changed = False
        for statement in body:
            taken = self._row_branch(statement)
            if taken is not None:
                flat += self.without_row_branches(taken)[0]
                changed = True
                continue
            for field in ("body", "orelse"):
                inner = getattr(statement, field, None)
                if inner and not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                    kept, other = self.without_row_branches(inner)
                    setattr(statement, field, kept or [ast.copy_location(ast.Pass(), statement)])
                    changed |= other
            flat.append(statement)
        return flat, changed

    def _row_branch(self, statement: ast.stmt) -> list[ast.stmt] | None:
        """What an `if` runs where the expert has rows, when it does nothing else where it has none; else None."""
        if not isinstance(statement, ast.If):
            return None
        kind = self.rows(statement.test)
        empty, full = (statement.body, statement.orelse) if kind == "none" else (statement.orelse, statement.body)
        return full if kind and all(isinstance(inner, _SKIPS) for inner in empty) else None

    def rows(self, test: ast.expr) -> str:
        """ "none" where a condition holds exactly when an expert has no rows, "some" when it has one, else ""."""
        opposite = {"none": "some", "some": "none", "": ""}
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return opposite[self.rows(test.operand)]
        if isinstance(test, ast.BoolOp):
            kinds = {self.rows(value) for value in test.values}
            wanted = "none" if isinstance(test.op, ast.Or) else "some"
            return wanted if kinds == {wanted} else ""
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            return self._compared(test.left, test.ops[0], test.comparators[0])
        return "some" if self._counts_rows(test) or self._is_any(test) else ""

    def _compared(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> str:
        if isinstance(left, ast.Constant):
            turned = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE}.get(type(op), type(op))
            return "" if isinstance(right, ast.Constant) else self._compared(right, turned(), left)
        ends = {left.id, right.id} if isinstance(left, ast.Name) and isinstance(right, ast.Name) else set()
        if len(ends) == 2 and ends <= self.bounds:
            return {ast.Eq: "none", ast.NotEq: "some"}.get(type(op), "")
        chosen = root_name(right) in self.choices
        if isinstance(op, (ast.In, ast.NotIn)) and chosen and loads(left) and loads(left) <= self.numbers:
            return "some" if isinstance(op, ast.In) else "none"
        if not isinstance(right, ast.Constant):
            return ""
        if self._is_any(left) and isinstance(right.value, bool) and isinstance(op, (ast.Eq, ast.Is)):
            return "some" if right.value else "none"
        if not self._counts_rows(left) or isinstance(right.value, bool):
            return ""
        kinds = {
            (ast.Eq, 0): "none",
            (ast.LtE, 0): "none",
            (ast.Lt, 1): "none",
            (ast.NotEq, 0): "some",
            (ast.Gt, 0): "some",
            (ast.GtE, 1): "some",
        }
        return kinds.get((type(op), right.value), "")  # type: ignore[arg-type]

    def _counts_rows(self, node: ast.expr) -> bool:
        """Is it a number of rows: t.numel(), len(t), t.shape[0], t.size(0), (ids == e).sum(), or a name for one?"""
        if isinstance(node, ast.Name):
            return node.id in self.counts
        if isinstance(node, ast.Subscript):
            first = isinstance(node.slice, ast.Constant) and node.slice.value == 0
            shape = node.value
            sized = isinstance(shape, ast.Call) and not shape.args and called(shape) == "size"
            return first and ((isinstance(shape, ast.Attribute) and shape.attr == "shape") or sized)
        if not isinstance(node, ast.Call):
            return False
        name, over = called(node), operand(node)
        if name in _COUNTING or (name == "len" and len(node.args) == 1):
            return True
        if name == "size":
            return len(node.args) == 1 and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0
        if name in ("item", "int", "cpu") and over is not None:
            return self._counts_rows(over)
        return name in ("sum", "count_nonzero") and over is not None and self._is_choice(over)

    def _is_any(self, node: ast.expr) -> bool:
        if not isinstance(node, ast.Call):
            return False
        name, over = called(node), operand(node)
        if name in ("item", "bool") and over is not None:
            return self._is_any(over)
        return name == "any" and over is not None and self._is_choice(over)

    def _is_choice(self, node: ast.expr) -> bool:
        return any(isinstance(inner, ast.Compare) for inner in ast.walk(node)) or root_name(node) in self.choices

    def _counts(self) -> set[str]:
        """Names for numbers of rows: what the loop runs over beside the expert's number, and what it counts itself."""
        self.counts = names(self.loop.target) - self.numbers
        for statement in ast.walk(self.loop):
            if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                target, value = statement.targets[0], statement.value
                picked = isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name)
                by_number = picked and bool(loads(value.slice) & self.numbers)  # type: ignore[attr-defined]
                if isinstance(target, ast.Name) and (self._counts_rows(value) or by_number):
                    self.counts.add(target.id)
        return self.counts

    def _bounds(self) -> set[str]:
        """Names that are read as bounds of slices alone, or to make the next ones: where sorted rows begin and end."""
        slices = [node for node in ast.walk(self.loop) if isinstance(node, ast.Slice)]
        inside = {id(node) for piece in slices for node in ast.walk(piece)}
        used = {name for piece in slices for name in loads(piece)} & self.assigned
        feeds: dict[str, set[str]] = {}
        free: set[str] = set()
        inside |= {
            id(node)
            for test in ast.walk(self.loop)
            if isinstance(test, (ast.If, ast.IfExp))
            for node in ast.walk(test.test)
        }
        for statement in statements(self.loop.body):
            targets = bound(statement)
            for node in own_nodes(statement):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and id(node) not in inside:
                    if targets:
                        feeds.setdefault(node.id, set()).update(targets)
                    else:
                        free.add(node.id)
        while True:
            more = {name for name, targets in feeds.items() if targets & used and name in self.assigned} - used
            if not more:
                break
            used |= more
        while True:
            fewer = {name for name in used if name in free or not feeds.get(name, set()) <= used}
            if not fewer:
                return used
            used -= fewer

    # Effects

    def lost_with_the_loop(self) -> list[Effect]:
        """What would be lost if one sum over all experts, or a matmul of ours, took the place of the loop."""
        found = [
            *self._meant_branches(self.loop.body),
            *self._cuts(),
            *written_elsewhere(self.loop.body, self.receiver),
        ]
        found += self._carried()
        sums = self._sums()
        if len(sums) > 1:
            results = ", ".join(f"`{name}`" for name in sums)
            last = max(sums.values(), key=lambda node: node.lineno)
            found.append(Effect(last.lineno, f"`{_text(last)}`: the loop makes more than one result ({results})"))
        return found

    def lost_on_more_experts(self) -> list[Effect]:
        """What experts without rows would change, if the loop ran for them too."""
        found = self._carried()
        for effect, statement in _writes_elsewhere(self.loop.body, self.receiver):
            # Adding the number of its rows changes nothing for an expert that has none.
            adds = isinstance(statement, ast.AugAssign) and isinstance(statement.op, (ast.Add, ast.Sub))
            if not (adds and self._counts_rows(statement.value)):  # type: ignore[attr-defined]
                found.append(effect)
        still = self.constant | self.numbers | {self.receiver}
        for name, statement in self._sums().items():
            derived = {target for node in statements(self.loop.body) for target in self._fixed(node, still)}
            if not loads(statement) - still - derived - {name}:
                found.append(Effect(statement.lineno, f"`{_text(statement)}` counts the experts that have rows"))
        return found

    def _fixed(self, statement: ast.stmt, still: set[str]) -> set[str]:
        value = getattr(statement, "value", None)
        return bound(statement) if value is not None and loads(value) <= still else set()

    def _meant_branches(self, body: list[ast.stmt]) -> Iterator[Effect]:
        for statement in body:
            taken = self._row_branch(statement)
            if taken is not None:
                yield from self._meant_branches(taken)
                continue
            tests: list[ast.expr] = [node.test for node in own_nodes(statement) if isinstance(node, ast.IfExp)]
            if isinstance(statement, (ast.If, ast.While, ast.Assert)):
                tests.append(statement.test)
            for test in tests:
                if not loads(test) <= self.constant | self.numbers | {self.receiver}:
                    why = "is not only whether the expert has rows"
                    yield Effect(statement.lineno, f"`{_text(statement)}`: what this branch asks {why}")
            if isinstance(statement, (ast.Raise, ast.Return, ast.Try)):
                yield Effect(statement.lineno, f"`{_text(statement)}` ends the loop or handles an error")
            for field in ("body", "orelse", "finalbody"):
                if not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                    yield from self._meant_branches(getattr(statement, field, None) or [])

    def _cuts(self) -> Iterator[Effect]:
        """Rows that are cut off without a branch: t[:capacity], min(n, capacity)."""
        for statement in statements(self.loop.body):
            for node in own_nodes(statement):
                limits = (
                    isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and called(node) in ("min", "max")
                )
                if limits and not loads(node) <= self.constant | self.numbers | {self.receiver}:
                    yield Effect(statement.lineno, f"`{_text(statement)}` limits how many rows an expert gets")
                if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
                    first = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) and node.slice.elts else node.slice
                    limited = isinstance(first, ast.Slice) and (first.lower is not None or first.upper is not None)
                    if limited and node.value.id in self.assigned and not loads(first) & self.bounds:
                        yield Effect(statement.lineno, f"`{_text(statement)}` cuts off rows of an expert")

    def _carried(self) -> list[Effect]:
        """Values that one expert hands to the next, or that the last one leaves behind."""
        found: list[Effect] = []
        sums = self._sums()
        first: dict[str, tuple[str, ast.expr]] = {}
        for name, kind, node in events(self.loop.body):
            if name in self.assigned:
                first.setdefault(name, (kind, node))
        for name in sorted(self.assigned - self.bounds - sums.keys() - names(self.loop.target)):
            kind, node = first[name]
            if kind == "load":
                found.append(Effect(node.lineno, f"`{name}` is carried from one expert to the next"))
        for name in sorted((self.assigned & self.read_behind) - sums.keys()):
            line = first[name][1].lineno if name in first else self.loop.lineno
            found.append(Effect(line, f"`{name}` is read behind the loop: it is what the last expert left"))
        return found

    def _sums(self) -> dict[str, ast.stmt]:
        """The local names that the loop adds to, and where; each is read in the loop for nothing else."""
        found: dict[str, ast.stmt] = {}
        fresh: set[str] = set(names(self.loop.target))
        reads: dict[str, int] = {}
        for name, kind, _ in events(self.loop.body):
            if kind == "load":
                reads[name] = reads.get(name, 0) + 1
        own: dict[str, int] = {}
        for statement in statements(self.loop.body):
            summed = {name for name in _summed(statement) if name not in fresh and name != self.receiver}
            for name in summed:
                found.setdefault(name, statement)
                own[name] = own.get(name, 0) + sum(
                    event == (name, "load") for event in ((n, k) for n, k, _ in events([statement]))
                )
            fresh |= bound(statement) - summed
        return {name: node for name, node in found.items() if own[name] == reads.get(name, 0)}


def written_elsewhere(body: list[ast.stmt], receiver: str) -> list[Effect]:
    """What statements write outside of the function's own names: attributes, a module's buffers, calls for effect."""
    return [effect for effect, _ in _writes_elsewhere(body, receiver)]


def _writes_elsewhere(body: list[ast.stmt], receiver: str) -> Iterator[tuple[Effect, ast.stmt]]:
    for statement in statements(body):
        for node in own_nodes(statement):
            stored = isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del))
            if isinstance(node, ast.Attribute) and stored:
                yield Effect(statement.lineno, f"`{_text(statement)}` writes an attribute"), statement
                continue
            subscript = isinstance(node, ast.Subscript) and stored
            method = isinstance(node, ast.Call) and _in_place(node)
            if (subscript or method) and root_name(node) == receiver:  # type: ignore[arg-type]
                yield Effect(statement.lineno, f"`{_text(statement)}` writes into the module"), statement
        call = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(call, ast.Call) and not (_in_place(call) and root_name(call)):
            into = any(word.arg == "out" and isinstance(word.value, ast.Name) for word in call.keywords)
            if not into:
                yield Effect(statement.lineno, f"`{_text(statement)}` is called for what it does"), statement


def _in_place(call: ast.Call) -> bool:
    name = called(call)
    return name in ("append", "extend", "add", "update", "insert") or (name.endswith("_") and not name.endswith("__"))


def _summed(statement: ast.stmt) -> set[str]:
    """The local names that a statement adds to: out += y, out[t] += y, out[t] = y, out = out + y, out.add_(y)."""
    if isinstance(statement, ast.AugAssign):
        adds = isinstance(statement.op, (ast.Add, ast.Sub))
        return {root_name(statement.target)} if adds and not _has_attribute(statement.target) else set()
    if isinstance(statement, ast.Assign):
        found = {root_name(t) for t in statement.targets if isinstance(t, ast.Subscript) and not _has_attribute(t)}
        for target in statement.targets:
            value = statement.value
            added = isinstance(value, ast.BinOp) and isinstance(value.op, (ast.Add, ast.Sub))
            method = isinstance(value, ast.Call) and called(value).rstrip("_") in ("index_add", "scatter_add", "add")
            if isinstance(target, ast.Name) and target.id in loads(value) and (added or method):
                found.add(target.id)
        return found - {""}
    call = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(call, ast.Call):
        for word in call.keywords:
            if word.arg == "out" and isinstance(word.value, ast.Name):
                return {word.value.id}
        if _in_place(call):
            return {root_name(call)} - {""}
    return set()


def _has_attribute(node: ast.expr) -> bool:
    while isinstance(node, ast.Subscript):
        node = node.value
    return not isinstance(node, ast.Name)


def _numbers(loop: ast.For) -> set[str]:
    """The names of the expert's number in a loop: in its target, and what `number.item()` or `number[0]` is called."""
    target, over = loop.target, loop.iter
    found: set[str] = set()
    if isinstance(target, ast.Name):
        found = {target.id}
    elif isinstance(target, (ast.Tuple, ast.List)) and isinstance(over, ast.Call):
        if called(over) == "enumerate":
            found = names(target.elts[0])
        elif called(over) == "zip":
            pairs = zip(target.elts, over.args, strict=False)
            found = found.union(*(names(t) for t, a in pairs if isinstance(a, ast.Call) and called(a) == "range"))
    for statement in statements(loop.body):
        named = isinstance(statement, ast.Assign) and root_name(statement.value) in found
        if named and loads(statement.value) - {"int"} <= found:  # type: ignore[attr-defined]
            found |= bound(statement)
    return found


def _constant(function: ast.FunctionDef, receiver: str) -> set[str]:
    """Names that no data decides: the module, what the function does not bind, and what is made of those alone."""
    arguments = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)} - {receiver}
    stored = {name for name, kind, _ in events(function.body) if kind == "store"} | arguments
    every = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    known = (every - stored) | {receiver}
    made: dict[str, list[set[str] | None]] = {}
    for statement in statements(function.body):
        value = statement.value if isinstance(statement, ast.Assign) else None
        plain = value is not None and not any(
            isinstance(node, ast.Call) and called(node) != "len" for node in ast.walk(value)
        )
        for name in bound(statement):
            made.setdefault(name, []).append(loads(value) if plain and value is not None else None)
    for _ in made:
        known |= {
            name
            for name, values in made.items()
            if name not in arguments and all(value is not None and value <= known for value in values)
        }
    return known


def _choices(function: ast.FunctionDef) -> set[str]:
    """Names for which choice was made: truth values, one-hot masks, ids, and what is picked out of them."""
    found: set[str] = set()
    assignments = [s for s in statements(function.body) if isinstance(s, ast.Assign)]
    for _ in range(len(assignments) + 1):
        size = len(found)
        for statement in assignments:
            compares = any(
                isinstance(node, ast.Compare) or (isinstance(node, ast.Call) and called(node) in _CHOOSING)
                for node in ast.walk(statement.value)
            )
            if compares or root_name(statement.value) in found:
                found |= bound(statement)
            if isinstance(statement.value, ast.Call) and called(statement.value) in ("unique", "tolist", "set"):
                found |= bound(statement)
        if len(found) == size:
            break
    return found


def _text(statement: ast.stmt) -> str:
    """The first line of a statement, as Python writes it."""
    return ast.unparse(statement).splitlines()[0]
