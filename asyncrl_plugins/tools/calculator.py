"""The tool `calculator`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from asyncrl.environments.interface import ToolError

MAX_BITS = 4096
"""Limit of bits of a result; `9 ** 9 ** 9` would else fill the memory."""
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def calculator(expression: str) -> int | float:
    """Compute an arithmetic expression.

    expression: numbers with + - * / // % ** and brackets, such as (37 + 4) * 2.
    """
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except ToolError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolError(f"calculator: {expression!r:.80} is no arithmetic expression") from None
    except (ArithmeticError, TypeError) as error:
        raise ToolError(f"calculator: {error}") from None
    if isinstance(value, complex) or value != value or abs(value) == float("inf"):
        raise ToolError("calculator: the result is no finite number")
    return value


def _value(node: ast.AST) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left), _value(node.right)
        whole = isinstance(left, int) and isinstance(right, int)
        if whole and isinstance(node.op, ast.Pow) and left.bit_length() * abs(right) > MAX_BITS:
            raise ToolError("calculator: the result is too large")
        return _bounded(_OPERATORS[type(node.op)](left, right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.operand))
    raise ValueError("not arithmetic")


def _bounded(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ToolError("calculator: the result is too large")
    return value
