"""Arithmetic over a model's dims, for counts and shapes in recipes: names, integers and + - * //, nothing else.

Recipes come from files that a user may have been given, so there is no eval; Python's own parser gives the tree, and
only the nodes listed here are computed.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping

from weightprep.errors import RecipeError

__all__ = ["evaluate", "names_in"]

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}
_MAX_LENGTH = 200
_MAX_VALUE = 1 << 48


def evaluate(expression: str | int, names: Mapping[str, int], where: str) -> int:
    """The value of `expression`.

    :param where: file and key path, for error messages
    :raises RecipeError: anything but names, integers and + - * //; an unknown name; a value beyond 2^48
    """
    value = _value(_parse(expression, where), names, where)
    if abs(value) > _MAX_VALUE:
        raise _refuse(where, f"{expression!r}, which is {value}", "a value below 2^48")
    return value


def names_in(expression: str | int, where: str) -> frozenset[str]:
    """The names that `expression` uses."""
    return frozenset(node.id for node in ast.walk(_parse(expression, where)) if isinstance(node, ast.Name))


def _parse(expression: str | int, where: str) -> ast.expr:
    text = str(expression)
    try:
        if len(text) > _MAX_LENGTH:
            raise ValueError
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _refuse(where, f"{text[:80]!r}", "names, integers and + - * //") from None
    for node in ast.walk(tree):
        is_known = isinstance(node, (ast.BinOp, ast.Name, ast.Load, *_OPERATORS))
        if not is_known and not (isinstance(node, ast.Constant) and type(node.value) is int):
            raise _refuse(where, f"{text!r}", "names, integers and + - * //")
    return tree


def _value(node: ast.expr, names: Mapping[str, int], where: str) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        if node.id not in names:
            raise _refuse(where, f"the name {node.id!r}", f"one of {', '.join(sorted(names))}")
        return names[node.id]
    if not isinstance(node, ast.BinOp):
        raise _refuse(where, ast.unparse(node), "names, integers and + - * //")
    left, right = _value(node.left, names, where), _value(node.right, names, where)
    if isinstance(node.op, ast.FloorDiv) and right == 0:
        raise _refuse(where, f"{ast.unparse(node)!r}, a division by zero", "a divisor that is not zero")
    result: int = _OPERATORS[type(node.op)](left, right)
    return result


def _refuse(where: str, found: str, wanted: str) -> RecipeError:
    return RecipeError(where, found=found, wanted=wanted, remedy="correct the expression")
