"""Spaces as Kernel Tuner and the T1 format write them: values, and conditions as text.

Conditions are parsed, never evaluated as code: arithmetic, comparisons, `and`, `or`, `not`, `in`, and a few functions.
"""

from __future__ import annotations

import ast
import json
import math
import operator
from typing import TYPE_CHECKING, Any, Final

from tunebook._base.errors import DefinitionError
from tunebook._space.space import Space

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_BINARY: Final[dict[type, Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_, ast.BitXor: operator.xor, ast.LShift: operator.lshift, ast.RShift: operator.rshift,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq,
    ast.NotEq: operator.ne, ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
    ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip
_UNARY: Final[dict[type, Callable[[Any], Any]]] = {
    ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert
}  # fmt: skip
_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "min": min, "max": max, "abs": abs, "int": int, "ceil": math.ceil, "floor": math.floor, "log2": math.log2,
}  # fmt: skip


class Expression:
    """A constraint as text over the names of axes, for `Space.where`; `write_t1` can write it.

    >>> accepts = Expression("block_x * block_y <= 1024 and block_x % 32 == 0")
    >>> accepts({"block_x": 64, "block_y": 8})
    True
    """

    __slots__ = ("_read", "names", "text")

    def __init__(self, text: str) -> None:
        self.text: Final = text.strip()
        try:
            # "&&" and "||" are how constraints of C++ tools come.
            tree = ast.parse(self.text.replace("&&", " and ").replace("||", " or "), mode="eval")
        except SyntaxError as error:
            raise DefinitionError(f"the condition {text!r} is not an expression: {error.msg}") from error
        self.names: Final = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        self._read = _reader(tree.body, text)

    def __call__(self, config: Any) -> bool:
        """Whether a configuration is accepted."""
        return bool(self._read(config))

    def __tunebook_checksum__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Expression({self.text!r})"


def _reader(node: Any, text: str) -> Callable[[Any], Any]:
    """Return a function of a configuration for a part of an expression."""
    match node:
        case ast.Name():
            return operator.itemgetter(node.id)
        case ast.Constant():
            return lambda _config: node.value
        case ast.BinOp(left, op, right) | ast.Compare(left, [op], [right]) if type(op) in _BINARY:
            first, second, binary = _reader(left, text), _reader(right, text), _BINARY[type(op)]
            return lambda config: binary(first(config), second(config))
        case ast.BoolOp():
            join = all if isinstance(node.op, ast.And) else any
            values = [_reader(part, text) for part in node.values]
            return lambda config: join(value(config) for value in values)
        case ast.IfExp():
            test, then, other = (_reader(part, text) for part in (node.test, node.body, node.orelse))
            return lambda config: then(config) if test(config) else other(config)
    apply, nodes = _application(node, text)
    parts = [_reader(part, text) for part in nodes]
    return lambda config: apply(*[part(config) for part in parts])


def _application(node: Any, text: str) -> tuple[Callable[..., Any], Sequence[ast.expr]]:
    """Return a part of an expression as a function and the parts that it is applied to."""
    match node:
        case ast.Tuple() | ast.List():
            return lambda *values: values, node.elts
        case ast.UnaryOp():
            return _UNARY[type(node.op)], (node.operand,)
        case ast.Compare():
            tests = [_BINARY[type(op)] for op in node.ops]
            return (
                lambda *values: all(test(a, b) for test, a, b in zip(tests, values, values[1:], strict=False)),
                (node.left, *node.comparators),
            )
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name], node.args
        case ast.Call():
            raise DefinitionError(
                f"the condition {text!r} calls {ast.unparse(node.func)}; only {', '.join(_FUNCTIONS)} are known"
            )
    raise DefinitionError(
        f"the condition {text!r} has a part that is not understood: {ast.unparse(node)!r}. Use arithmetic, "
        f"comparisons, and, or, not, in, and {', '.join(_FUNCTIONS)}; or a function with Space.where"
    )


def from_kernel_tuner(tune_params: Mapping[str, Iterable[Any]], restrictions: Sequence[str] = ()) -> Space:
    """Return the space of Kernel Tuner's `tune_params`, and of its `restrictions` as text.

    >>> len(from_kernel_tuner({"block_size_x": [32, 64, 128], "tile": [1, 2]}, ["block_size_x * tile <= 128"]))
    5
    """
    space = Space(**{name: list(values) for name, values in tune_params.items()})
    for text in restrictions:
        space = space.where(Expression(text))
    return space


def read_t1(document: Mapping[str, Any]) -> Space:
    """Return the space of a T1 document, as `json.load` returns it."""
    try:
        described = document["ConfigurationSpace"]
        axes = {str(p["Name"]): _values(p["Values"]) for p in described["TuningParameters"]}
        conditions = [str(c["Expression"]) for c in described.get("Conditions", ())]
    except (KeyError, TypeError) as error:
        raise DefinitionError(
            f"this is not a T1 document: {type(error).__name__}: {error}. It needs ConfigurationSpace with "
            "TuningParameters, each with Name and Values"
        ) from error
    return from_kernel_tuner(axes, conditions)


def _values(values: Any) -> list[Any]:
    """Return the values of a T1 axis, which are a list or the text of a list."""
    if isinstance(values, str):
        try:
            values = ast.literal_eval(values)
        except (ValueError, SyntaxError) as error:
            raise DefinitionError(f"the values {values!r} are not a list of numbers or strings") from error
    return list(values)


def write_t1(space: Space) -> dict[str, Any]:
    """Return a space as a T1 document, for `json.dump`; its constraints must be `Expression`s."""
    conditions = []
    for constraint in space.constraints:
        if not isinstance(constraint, Expression):
            raise DefinitionError(
                f"the constraint {constraint!r} is Python code, which T1 cannot hold; write it as "
                'where(tunebook.search.Expression("block_x * block_y <= 1024"))'
            )
        names = [name for name in space.axes if name in constraint.names]
        conditions.append({"Expression": constraint.text, "Parameters": names})
    parameters = []
    types = (({int}, "int"), ({str}, "string"), ({int, float}, "float"))
    for name, values in space.axes.items():
        kind = next((word for allowed, word in types if {*map(type, values)} <= allowed), None)
        if kind is None:
            raise DefinitionError(f"axis {name!r} has values that T1 cannot hold; its types are int, float and string")
        parameters.append({"Name": name, "Type": kind, "Values": json.dumps(list(values))})
    return {"ConfigurationSpace": {"TuningParameters": parameters, "Conditions": conditions}}
