"""Shape expressions of a chain: text in the chain's symbols, parsed once into a function of ints or SymInts.

An expression is integer arithmetic as sympy prints it: names, integers, + - * / // % **, `floor`, `ceiling`, `Max`,
`Min`, `Mod`, `FloorDiv`, `CeilDiv`. The text is checked against this grammar before sympy
sees it (sympy evaluates what it parses), simplified by sympy, and turned into Python source which uses only
operators that symbolic integers have, so evaluating it in a fake implementation adds no guard.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import sympy
import torch


class ShapeExpressionError(ValueError):
    """A shape expression that cannot be parsed; the message shows it and what is wrong."""


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "floor": sympy.floor,
    "ceiling": sympy.ceiling,
    "Max": sympy.Max,
    "Min": sympy.Min,
    "Mod": sympy.Mod,
    "FloorDiv": lambda a, b: sympy.floor(a / b),
    "CeilDiv": lambda a, b: sympy.ceiling(a / b),
}
_NODES = (
    ast.Expression,
    ast.BinOp,
    ast.UnaryOp,
    ast.Constant,
    ast.Name,
    ast.Load,
    ast.Call,
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.Div,
    ast.FloorDiv,
    ast.Mod,
    ast.Pow,
    ast.USub,
)


@lru_cache(maxsize=4096)
def compile_shape(shape: tuple[str, ...], symbols: tuple[str, ...]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """The function values -> sizes of `shape`; `values` are those of `symbols`, in order.

    Raises ShapeExpressionError for text outside the grammar, an unknown symbol or a result that is no integer.
    """
    arguments = {name: sympy.Symbol(name, integer=True, nonnegative=True) for name in symbols}
    sources = {arguments[name]: f"v[{i}]" for i, name in enumerate(symbols)}
    parts = [_source(_parse(text, arguments), sources, text) for text in shape]
    code = f"lambda v: ({''.join(part + ', ' for part in parts)})"
    return eval(code, {"sym_max": torch.sym_max, "sym_min": torch.sym_min})


def canonical(text: str, symbols: Sequence[str]) -> sympy.Expr:
    """The expression as sympy sees it, to compare two spellings. Raises ShapeExpressionError."""
    return _parse(text, {name: sympy.Symbol(name, integer=True, nonnegative=True) for name in symbols})


def _parse(text: str, symbols: dict[str, sympy.Symbol]) -> sympy.Expr:
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError:
        raise ShapeExpressionError(f"shape expression {text!r} is not an expression") from None
    for node in ast.walk(tree):
        if not isinstance(node, _NODES):
            raise ShapeExpressionError(f"shape expression {text!r}: {type(node).__name__} is not allowed")
    try:
        return sympy.sympify(_evaluate(tree.body, symbols, text))
    except ZeroDivisionError:
        raise ShapeExpressionError(f"shape expression {text!r} divides by zero") from None


def _evaluate(node: ast.expr, symbols: dict[str, sympy.Symbol], text: str) -> Any:
    if isinstance(node, ast.Constant):
        if type(node.value) is not int:
            raise ShapeExpressionError(f"shape expression {text!r}: {node.value!r} is not an integer")
        return sympy.Integer(node.value)
    if isinstance(node, ast.Name):
        if node.id not in symbols:
            known = ", ".join(symbols) or "none"
            raise ShapeExpressionError(f"shape expression {text!r}: unknown symbol {node.id!r}; symbols: {known}")
        return symbols[node.id]
    if isinstance(node, ast.UnaryOp):
        return -_evaluate(node.operand, symbols, text)
    if isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else None
        if name not in _FUNCTIONS or node.keywords:
            known = ", ".join(_FUNCTIONS)
            raise ShapeExpressionError(f"shape expression {text!r}: only these functions are known: {known}")
        try:
            return _FUNCTIONS[name](*[_evaluate(a, symbols, text) for a in node.args])
        except TypeError as error:
            raise ShapeExpressionError(f"shape expression {text!r}: {error}") from None
    assert isinstance(node, ast.BinOp), node
    left, right = _evaluate(node.left, symbols, text), _evaluate(node.right, symbols, text)
    if isinstance(node.op, (ast.Div, ast.FloorDiv, ast.Mod)) and right == 0:
        raise ZeroDivisionError
    if isinstance(node.op, ast.Add):
        return left + right
    if isinstance(node.op, ast.Sub):
        return left - right
    if isinstance(node.op, ast.Mult):
        return left * right
    if isinstance(node.op, ast.Div):
        return left / right
    if isinstance(node.op, ast.FloorDiv):
        return sympy.floor(left / right)
    if isinstance(node.op, ast.Mod):
        return sympy.Mod(left, right)
    return left**right


def _source(expr: sympy.Expr, names: dict[sympy.Symbol, str], text: str) -> str:
    """Python source of an integer-valued expression."""
    if isinstance(expr, sympy.Integer):
        return str(int(expr)) if expr >= 0 else f"({int(expr)})"
    if isinstance(expr, sympy.Symbol):
        return names[expr]
    if isinstance(expr, (sympy.floor, sympy.ceiling)):
        numerator, denominator = sympy.fraction(sympy.together(expr.args[0]))
        top, bottom = _source(numerator, names, text), _source(denominator, names, text)
        if isinstance(expr, sympy.floor):
            return f"({top} // {bottom})"
        return f"(({top} + {bottom} - 1) // {bottom})"
    inner = list(expr.args)
    if isinstance(expr, sympy.Add):
        return f"({' + '.join(_source(a, names, text) for a in inner)})"
    if isinstance(expr, sympy.Mul) and all(a.is_integer for a in inner):
        return f"({' * '.join(_source(a, names, text) for a in inner)})"
    if isinstance(expr, sympy.Pow) and isinstance(expr.exp, sympy.Integer) and expr.exp > 0:
        return f"({_source(expr.base, names, text)} ** {int(expr.exp)})"
    if isinstance(expr, sympy.Mod):
        return f"({_source(inner[0], names, text)} % {_source(inner[1], names, text)})"
    if isinstance(expr, (sympy.Max, sympy.Min)):
        function = "sym_max" if isinstance(expr, sympy.Max) else "sym_min"
        result = _source(inner[0], names, text)
        for arg in inner[1:]:
            result = f"{function}({result}, {_source(arg, names, text)})"
        return result
    raise ShapeExpressionError(f"shape expression {text!r}: {expr} is not a whole number for all sizes; use //")
