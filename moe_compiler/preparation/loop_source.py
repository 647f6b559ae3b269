"""A function's source as something to change: where its loops are, what they see, and the function without one of them.

`moe_compiler.prepare` uses it on the methods of one module. The names of files and lines stay those of the user, so
that a message about the changed function still points at the user's own line. What a loop does is read in
`loop_effects`; nothing here knows about experts.
"""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from moe_compiler.preparation.loop_effects import Effect, LoopReading, written_elsewhere

__all__ = ["Place", "Source", "read_source"]

_FUTURE_ANNOTATIONS = 0x1000000
_OBSERVE, _VALUE = "_moepdl_observe", "_moepdl_value"


@dataclass(frozen=True)
class Place:
    """The `index`-th loop of a function, counted from its top, with `after` statements behind it in the same body."""

    index: int
    line: int
    after: int


class Source:
    """The source of one function, decorators included."""

    def __init__(self, function: Callable[..., Any], tree: ast.FunctionDef, file: str) -> None:
        self.function = function
        self.tree = tree
        self.file = file

    @property
    def receiver(self) -> str:
        """The name of the first parameter, `self` of a method; "" when there is none."""
        arguments = [*self.tree.args.posonlyargs, *self.tree.args.args]
        return arguments[0].arg if arguments else ""

    def loops(self) -> list[Place]:
        """The outermost `for` statements, in order."""
        return [
            Place(index, body[at].lineno, len(body) - at - 1) for index, (body, at) in enumerate(_loops(self.tree.body))
        ]

    def loaded(self, place: Place) -> set[str]:
        """The names that a loop and the statements behind it read."""
        body, at = list(_loops(self.tree.body))[place.index]
        return set().union(*(_loads(statement) for statement in body[at:]))

    def observed(self, observe: Callable[[int, int, dict[str, Any]], None]) -> Callable[..., Any]:
        """The same function; it calls observe(loop, stage, its locals) before each loop (stage -1), and behind the
        loop and each statement that follows it in the same body (stage 0, 1, ...).
        """
        tree = copy.deepcopy(self.tree)
        for index, (body, at) in reversed(list(enumerate(_loops(tree.body)))):
            told: list[ast.stmt] = [*body[:at], _call_observer(index, -1, body[at])]
            for stage, statement in enumerate(body[at:]):
                told += [statement, _call_observer(index, stage, statement)]
            body[:] = told
        return self._compiled(tree, {_OBSERVE: observe})

    def without_loop(
        self, place: Place, stage: int, result: str, dispatch: Callable[..., Any], names: Sequence[str]
    ) -> Callable[..., Any]:
        """The function with `result = dispatch(self, *names)` in place of a loop and `stage` statements behind it.

        What only fed the loop is left out as well.
        """
        tree = copy.deepcopy(self.tree)
        body, at = list(_loops(tree.body))[place.index]
        call = ast.parse(f"{result} = {_VALUE}({', '.join([self.receiver, *names])})").body[0]
        _move(call, body[at])
        body[at : at + stage + 1] = [call]
        return self._compiled(self._pruned(tree), {_VALUE: dispatch})

    def with_plain_loop(self, place: Place, items: int) -> Callable[..., Any]:
        """The function with its loop over 0 .. items - 1, whatever it ran over, and without branches about rows.

        A loop over range, enumerate or zip keeps what it runs over. Only branches that ask exactly whether there are
        rows, and do nothing where there are none, are left out; every other one stays as it is. Raises ValueError,
        with the line, where a pass without rows would change something that the loop does besides its sum.
        """
        tree = copy.deepcopy(self.tree)
        body, at = list(_loops(tree.body))[place.index]
        loop = body[at]
        assert isinstance(loop, ast.For)
        reading = LoopReading(tree, loop, self.receiver)
        lost = reading.lost_on_more_experts()
        called = loop.iter.func if isinstance(loop.iter, ast.Call) else None
        more = not (isinstance(called, ast.Name) and called.id in ("range", "enumerate", "zip"))
        if more:
            if not isinstance(loop.target, ast.Name):
                raise ValueError("the loop unpacks what it runs over")
            loop.iter = _move(ast.parse(f"range({items})", mode="eval").body, loop.iter)
            loop.body = [_Number(loop.target.id).visit(statement) for statement in loop.body]
        loop.body, flattened = reading.without_row_branches(loop.body)
        if (more or flattened) and lost:
            raise ValueError(f"line {lost[0].line}: {lost[0].what}")
        return self._compiled(self._pruned(tree), {})

    def lost(self, place: Place | None, stage: int = 0) -> list[Effect]:
        """What would be lost without a loop and `stage` statements behind it (None: without all of the body), besides
        the sum that it makes.
        """
        loops = list(_loops(self.tree.body))
        if place is None:
            found = written_elsewhere(self.tree.body, self.receiver)
        else:
            loops = loops[place.index : place.index + 1]
            ((body, at),) = loops
            found = written_elsewhere(body[at + 1 : at + 1 + stage], self.receiver)
        for body, at in loops:
            loop = body[at]
            assert isinstance(loop, ast.For)
            found += LoopReading(self.tree, loop, self.receiver).lost_with_the_loop()
        return list(dict.fromkeys(found))

    def with_body(self, dispatch: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
        """The function with `return dispatch(self, *names)` as all of its body."""
        tree = copy.deepcopy(self.tree)
        call = ast.parse(f"return {_VALUE}({', '.join([self.receiver, *names])})").body[0]
        tree.body = [_move(call, tree.body[0])]
        return self._compiled(tree, {_VALUE: dispatch})

    def _pruned(self, tree: ast.FunctionDef) -> ast.FunctionDef:
        """Without the assignments whose values nobody reads any more; what was unread before stays."""
        idle = {(node.lineno, node.col_offset) for node in _unread(copy.deepcopy(self.tree.body), set())}
        _unread(tree.body, set(), keep=idle)
        return tree

    def _compiled(self, tree: ast.FunctionDef, extra: dict[str, Any]) -> Callable[..., Any]:
        tree = copy.deepcopy(tree)
        decorators, tree.decorator_list = tree.decorator_list, []
        # Defaults and annotations were evaluated where the function was defined; neither is evaluated again.
        arguments = tree.args
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            argument.annotation = None
        for single in (arguments.vararg, arguments.kwarg):
            if single is not None:
                single.annotation = None
        tree.returns = None
        arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
        arguments.kw_defaults = [None if default is None else ast.Constant(None) for default in arguments.kw_defaults]
        code = self.function.__code__
        cells = {
            name: cell.cell_contents
            for name, cell in zip(code.co_freevars, self.function.__closure__ or (), strict=True)
            if not _is_empty(cell)
        }
        free = {**cells, **extra}
        factory = ast.parse(f"def _moepdl_factory({', '.join(free)}):\n    return {tree.name}").body[0]
        assert isinstance(factory, ast.FunctionDef)
        factory.body.insert(0, tree)
        module = ast.fix_missing_locations(ast.Module(body=[factory], type_ignores=[]))
        made: dict[str, Any] = {}
        flags = code.co_flags & _FUTURE_ANNOTATIONS
        exec(compile(module, self.file, "exec", flags=flags, dont_inherit=True), self.function.__globals__, made)
        function = made["_moepdl_factory"](**free)
        function.__defaults__ = self.function.__defaults__
        function.__kwdefaults__ = self.function.__kwdefaults__
        function.__qualname__ = self.function.__qualname__
        function.__doc__ = self.function.__doc__
        for decorator in reversed(decorators):
            expression = ast.fix_missing_locations(ast.Expression(decorator))
            function = eval(compile(expression, self.file, "eval"), self.function.__globals__, cells)(function)
        return function  # type: ignore[no-any-return]


def read_source(function: Callable[..., Any]) -> Source | None:
    """The source of a Python function, behind its decorators; None when it cannot be read."""
    plain = inspect.unwrap(function)
    if not isinstance(plain, types.FunctionType):
        return None
    try:
        lines, first = inspect.getsourcelines(plain)
        tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    if not isinstance(tree, ast.FunctionDef):
        return None
    ast.increment_lineno(tree, first - 1)
    return Source(plain, tree, inspect.getsourcefile(plain) or plain.__code__.co_filename)


def _is_empty(cell: Any) -> bool:
    try:
        return cell.cell_contents is cell
    except ValueError:
        return True


def _bodies(statement: ast.stmt) -> list[list[ast.stmt]]:
    """The statement lists directly inside of a statement."""
    found = [getattr(statement, name, None) for name in ("body", "orelse", "finalbody")]
    found += [handler.body for handler in getattr(statement, "handlers", ())]
    return [body for body in found if body]


def _loops(body: list[ast.stmt]) -> Iterator[tuple[list[ast.stmt], int]]:
    """(body, position) of each outermost `for`."""
    for at, statement in enumerate(body):
        if isinstance(statement, ast.For):
            yield body, at
        elif not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            for inner in _bodies(statement):
                yield from _loops(inner)


def _loads(node: ast.AST) -> set[str]:
    return {
        inner.id
        for inner in ast.walk(node)
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, (ast.Load, ast.Del))
    } | {
        # `a += b` reads a, though a stands there as a target.
        name.id
        for inner in ast.walk(node)
        if isinstance(inner, ast.AugAssign)
        for name in ast.walk(inner.target)
        if isinstance(name, ast.Name)
    }


def _targets(statement: ast.stmt) -> set[str] | None:
    """The plain names that an assignment binds; None for any other statement or target."""
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        targets = [statement.target]
    else:
        return None
    names: set[str] = set()
    for target in targets:
        for item in target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]:
            if not isinstance(item, ast.Name):
                return None
            names.add(item.id)
    return names


def _unread(body: list[ast.stmt], live: set[str], keep: set[tuple[int, int]] | None = None) -> list[ast.stmt]:
    """Assignments to names that are not read afterwards; `live` are those read behind the body, and is brought to
    those read in it and behind it. They are taken out of the body unless `keep` is None or has their position.
    """
    found: list[ast.stmt] = []
    left: list[ast.stmt] = []
    for statement in reversed(body):
        names = _targets(statement)
        if names is not None and not names & live:
            found.append(statement)
            if keep is not None and (statement.lineno, statement.col_offset) not in keep:
                continue
        left.append(statement)
        if names is not None:
            live -= names
        inner = [] if isinstance(statement, (ast.FunctionDef, ast.ClassDef)) else _bodies(statement)
        behind = set(live)
        if isinstance(statement, (ast.For, ast.While)):
            behind |= _loads(statement)
        reads: set[str] = set()
        for part in inner:
            own = set(behind)
            found += _unread(part, own, keep)
            reads |= own
            if not part:
                part.append(_move(ast.Pass(), statement))
        live |= reads | (behind if inner else set())
        live |= _own_loads(statement) if inner else _loads(statement)
    if keep is not None:
        body[:] = reversed(left)
    return found


def _own_loads(statement: ast.stmt) -> set[str]:
    """What a compound statement reads outside of its bodies."""
    inside = {id(node) for body in _bodies(statement) for part in body for node in ast.walk(part)}
    return {
        node.id
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and id(node) not in inside
    }


class _Number(ast.NodeTransformer):
    """A loop variable that was a tensor is a number now: v[0], v.item(), v.squeeze() are v, a[v].squeeze(0) is a[v]."""

    def __init__(self, name: str) -> None:
        self.name = name

    def _is_own(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id == self.name

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        zero = isinstance(node.slice, ast.Constant) and node.slice.value == 0
        return node.value if zero and self._is_own(node.value) and isinstance(node.ctx, ast.Load) else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        method = node.func
        if isinstance(method, ast.Attribute) and method.attr in ("item", "squeeze", "long", "int"):
            if self._is_own(method.value):
                return method.value
            # A row that was picked by a tensor of one element kept its first dimension.
            picked = isinstance(method.value, ast.Subscript) and self._is_own(method.value.slice)
            if picked and method.attr == "squeeze" and [ast.unparse(a) for a in node.args] == ["0"]:
                return method.value
        return node


def _call_observer(index: int, stage: int, near: ast.stmt) -> ast.stmt:
    return _move(ast.parse(f"{_OBSERVE}({index}, {stage}, locals())").body[0], near)


def _move(node: Any, to: ast.AST) -> Any:
    """Give a new node and all below it the place of an old one."""
    for inner in ast.walk(node):
        if hasattr(inner, "lineno") or isinstance(inner, (ast.stmt, ast.expr)):
            ast.copy_location(inner, to)
    return node
