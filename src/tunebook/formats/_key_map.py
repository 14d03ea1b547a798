"""The key of an entry in another tool's words: numbers of a file, computed from the arguments of the tuned call.

The expressions of `tunebook export --map E=w1.shape[0]` are parsed, never evaluated as code: names of arguments,
`.shape` and `.dtype` of arrays, fields, items, numbers, quoted text, lists, and `+ - * // %`.
"""

from __future__ import annotations

import ast
import operator
from typing import TYPE_CHECKING, Any, Final

from tunebook._base.errors import CodecError, DefinitionError
from tunebook._keys.key_text import spell_out

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tunebook._base.vocabulary import Json, Problem

_ARITHMETIC: Final[Mapping[type, Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class KeyMap:
    """A file's key as expressions over the arguments of a call.

    >>> from tunebook._base.vocabulary import Problem
    >>> to_file = KeyMap({"E": "w.shape[0]", "M": "x.shape[0] * top_k", "dtype": "'fp8_w8a8'"})
    >>> key = {"w": {"$array": ["torch", "bfloat16", [8, 64], "C", "gpu"]}, "top_k": 2}
    >>> to_file({**key, "x": {"$array": ["torch", "bfloat16", ["~512", 64], "C", "gpu"]}}, Problem("", "moe@v0", ""))
    {'E': 8, 'M': 1024, 'dtype': 'fp8_w8a8'}
    """

    def __init__(self, expressions: Mapping[str, str]) -> None:
        self._parsed: Final = {name: _parse(name, text) for name, text in expressions.items()}

    def __call__(self, key: Mapping[str, Json], problem: Problem) -> dict[str, Any]:
        """Return the key in the file; `CodecError` if the call lacks a part that an expression names."""
        arguments: dict[str, Any] = {}
        for name, value in key.items():
            head, dot, part = name.partition(".")  # the Triton adapter keys the dtype of `x` as "x.dtype"
            if dot:
                arguments.setdefault(head, {})[part] = _plain(value)
            else:
                arguments[name] = _plain(value)
        made = {}
        for name, expression in self._parsed.items():
            try:
                made[name] = _value(expression.body, arguments)
            except (LookupError, TypeError, ValueError, ArithmeticError) as error:
                raise CodecError(
                    f"--map {name}={ast.unparse(expression)} does not fit an entry of {problem.op!r}: "
                    f"{type(error).__name__}: {error}. Its call has {'; '.join(spell_out(problem.call_key))}. "
                    f"Text needs quotes: --map \"{name}='...'\""
                ) from error
        return made


def _parse(name: str, text: str) -> ast.Expression:
    try:
        parsed = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError) as error:
        raise DefinitionError(f"--map {name}={text} is not an expression: {error}") from error
    known = (ast.Constant, ast.Name, ast.Attribute, ast.Subscript, ast.List, ast.Tuple, ast.BinOp, ast.UnaryOp)
    for node in ast.walk(parsed):
        if isinstance(node, ast.expr) and not isinstance(node, known):
            raise DefinitionError(
                f"--map {name}={text} has a part that is not understood: {ast.unparse(node)!r}. Use arguments, their "
                ".shape[i] and .dtype, numbers, quoted text, lists, and + - * // %"
            )
    return parsed


def _value(node: ast.expr, arguments: Mapping[str, Any]) -> Any:  # noqa: PLR0911 - one per kind of expression
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return arguments[node.id]
        case ast.Attribute():
            return _value(node.value, arguments)[node.attr]
        case ast.Subscript():
            return _value(node.value, arguments)[_value(node.slice, arguments)]
        case ast.List() | ast.Tuple():
            return [_value(item, arguments) for item in node.elts]
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand, arguments)
        case ast.BinOp() if type(node.op) in _ARITHMETIC:
            return _ARITHMETIC[type(node.op)](_value(node.left, arguments), _value(node.right, arguments))
    raise ValueError(f"{ast.unparse(node)!r} is not understood; arithmetic is + - * // %")


def _plain(value: Json) -> Any:
    """Return a part of a call key as plain values: a bucket is its representative, an array its shape and dtype."""
    match value:
        case {"$array": [_, dtype, list(shape), *_]}:
            return {"dtype": dtype, "shape": [int(n.removeprefix("~")) if isinstance(n, str) else n for n in shape]}
        case {"$bucket": content} | {"$tuple": content} | {"$dtype": content}:
            return _plain(content)
        case {"$object": [_, content]} | {"$scalar": [_, content]} | {"$enum": [_, content]}:
            return _plain(content)
        case dict():
            return {name: _plain(item) for name, item in value.items()}
        case list():
            return [_plain(item) for item in value]
    return value
