"""The decorators of a kernel's function that belong to its code."""

from __future__ import annotations

import ast
from collections import ChainMap
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from tunebook._code.source import closure

if TYPE_CHECKING:
    from collections.abc import Mapping


def kept_decorators(node: ast.AST | None, f: FunctionType) -> list[ast.expr]:
    """Return the decorators of a function without tunebook's own, which name candidates and not code."""
    names = ChainMap(closure(f), f.__globals__)
    return [item for item in getattr(node, "decorator_list", ()) if not _is_ours(item, names)]


def _is_ours(decorator: ast.expr, names: Mapping[str, Any]) -> bool:
    node, last = decorator, ""  # `last` is the last name of `a.b.c(...)`, and `root` the first
    while isinstance(node, (ast.Call, ast.Attribute)):
        if isinstance(node, ast.Attribute):
            last = last or node.attr
        node = node.func if isinstance(node, ast.Call) else node.value
    root = node.id if isinstance(node, ast.Name) else ""
    if root not in names:
        return (last or root) == "tunable"  # imported inside a function: only the name is known
    found = names[root]
    module = found.__name__ if isinstance(found, ModuleType) else getattr(found, "__module__", None)
    return str(module).partition(".")[0] == "tunebook"
