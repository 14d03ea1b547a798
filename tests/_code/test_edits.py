"""Which edits change the checksum of a kernel, and which changes of a running program do not."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import types
import weakref
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tunebook import Kernel
from tunebook._code import checksum as checksum_module
from tunebook._code import source
from tunebook._code.checksum import code_checksum, source_digest

if TYPE_CHECKING:
    from pathlib import Path


class Programs:
    """Runs program texts, each in a new folder with other files beside it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._monkeypatch = monkeypatch
        self._count = 0

    def run(self, text: str, files: dict[str, str] | None = None, *, from_file: bool = True) -> dict[str, object]:
        """Run a program whose kernel is the function `k`; return its variables."""
        self._count += 1
        folder = self._folder / str(self._count)
        for name, content in {"program.py": text, **(files or {})}.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        for name in {"helpers", "other", *(name for name in sys.modules if name.partition(".")[0] == "package")}:
            self._monkeypatch.delitem(sys.modules, name, raising=False)
        self._monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
        module = types.ModuleType("program")
        self._monkeypatch.setitem(sys.modules, "program", module)
        filename = str(folder / "program.py") if from_file else "<stdin>"
        if from_file:
            module.__file__ = filename
        exec(compile(text, filename, "exec", dont_inherit=True), vars(module))
        return vars(module)

    def checksum(self, text: str, files: dict[str, str] | None = None, *, from_file: bool = True) -> str:
        return code_checksum(self.run(text, files, from_file=from_file)["k"])


@pytest.fixture
def programs(tmp_path, monkeypatch):
    return Programs(tmp_path, monkeypatch)


def program(before: str, body: str) -> str:
    return f"{before}\ndef k(n, *, config=None):\n    {body}\n"


# Each row: a name, the lines before the kernel, its body, and the edit.
EDITS = [
    ("body", "", "return n + 1", ("n + 1", "n + 2")),
    ("global constant", "S = 1", "return n * S", ("S = 1", "S = 2")),
    ("helper", "def h(n): return n + 1", "return h(n)", ("n + 1", "n + 2")),
    ("default of a helper", "def h(n, s=1): return n * s", "return h(n)", ("s=1", "s=2")),
    ("SimpleNamespace", "from types import SimpleNamespace as NS\nC = NS(s=1)", "return n * C.s", ("s=1", "s=2")),
    ("whole SimpleNamespace", "from types import SimpleNamespace as NS\nC = NS(s=1)", "return vars(C)", ("s=1", "s=2")),
    ("argparse.Namespace", "import argparse\nC = argparse.Namespace(s=1)", "return n * C.s", ("s=1", "s=2")),
    ("plain object", "class P: pass\nC = P(); C.s = 1", "return n * C.s", ("C.s = 1", "C.s = 2")),
    (
        "argument of a constructor",
        "class P:\n    def __init__(self, s): self.s = s\nC = P(1)",
        "return n * C.s",
        ("P(1)", "P(2)"),
    ),
    (
        "derived attribute",
        "class P:\n    def __init__(self, s): self.t = s\nC = P(1)",
        "return n * C.t",
        ("P(1)", "P(2)"),
    ),
    (
        "attribute in a helper",
        "class P:\n    def __init__(self, s): self.t = s\nC = P(1)\ndef h(c): return c.t",
        "return h(C)",
        ("P(1)", "P(2)"),
    ),
    ("slot", "class P:\n    __slots__ = ('s',)\nC = P(); C.s = 1", "return n * C.s", ("C.s = 1", "C.s = 2")),
    (
        "nested objects",
        "from types import SimpleNamespace as NS\nclass P: pass\nC = P(); C.a = NS(s=[1])",
        "return n * C.a.s[0]",
        ("[1]", "[2]"),
    ),
    (
        "NamedTuple",
        "from typing import NamedTuple\nclass P(NamedTuple):\n    s: int\nC = P(1)",
        "return n * C.s",
        ("P(1)", "P(2)"),
    ),
    ("class constant", "class P: S = 1", "return n * P.S", ("S = 1", "S = 2")),
    ("class constant from a global", "V = 1\nclass P: S = V", "return n * P.S", ("V = 1", "V = 2")),
    (
        "class constant read by a method",
        "V = 1\nclass P:\n    S = V\n    def h(self): return self.S",
        "return P().h()",
        ("V = 1", "V = 2"),
    ),
    ("class attribute set later", "class P: pass\nP.S = 1", "return n * P.S", ("S = 1", "S = 2")),
    ("enum from a global", "import enum\nV = 1\nclass P(enum.Enum): S = V", "return n * P.S.value", ("V = 1", "V = 2")),
    (
        "whole enum from a global",
        "import enum\nV = 1\nclass P(enum.Enum): S = V",
        "return [p for p in P]",
        ("V = 1", "V = 2"),
    ),
    ("dict", "C = {'s': 1}", "return n * C['s']", ("1", "2")),
    ("dict of functions", "def h(n): return n + 1\nC = {'s': h}", "return C['s'](n)", ("n + 1", "n + 2")),
    ("list", "C = [1]", "return n * C[0]", ("[1]", "[2]")),
    ("list read in a loop", "C = [0, 1]", "return [n * c for c in C]", ("[0, 1]", "[0, 2]")),
    ("lru_cache", "import functools\n@functools.lru_cache\ndef h(n): return n + 1", "return h(n)", ("n + 1", "n + 2")),
    (
        "partial",
        "import functools\ndef g(a, n): return n * a\nh = functools.partial(g, 1)",
        "return h(n)",
        ("g, 1", "g, 2"),
    ),
    (
        "singledispatch",
        ("import functools\n@functools.singledispatch\ndef h(n): return n\n@h.register\ndef _(n: int): return n + 1"),
        "return h(n)",
        ("n + 1", "n + 2"),
    ),
    ("static method", "class P:\n    @staticmethod\n    def h(n): return n + 1", "return P.h(n)", ("n + 1", "n + 2")),
    (
        "class method",
        "class P:\n    @classmethod\n    def h(cls, n): return n + cls.S\nP.S = 1",
        "return P.h(n)",
        ("P.S = 1", "P.S = 2"),
    ),
    (
        "helper of a method",
        "def g(n): return n + 1\nclass P:\n    def h(self, n): return g(n)\np = P()",
        "return p.h(n)",
        ("n + 1", "n + 2"),
    ),
    (
        "helper of a property",
        "def g(): return 1\nclass P:\n    @property\n    def s(self): return g()\np = P()",
        "return n * p.s",
        ("return 1", "return 2"),
    ),
    (
        "helper of a cached_property",
        (
            "import functools\ndef g(): return 1\nclass P:\n    @functools.cached_property\n"
            "    def s(self): return g()\np = P()"
        ),
        "return n * p.s",
        ("return 1", "return 2"),
    ),
    (
        "callable object",
        "class P:\n    def __call__(self, n): return n + 1\np = P()",
        "return p(n)",
        ("n + 1", "n + 2"),
    ),
    (
        "inherited method",
        "class B:\n    def h(self, n): return n + 1\nclass P(B): pass\np = P()",
        "return p.h(n)",
        ("n + 1", "n + 2"),
    ),
    (
        "__getattr__ of an object",
        "class P:\n    def __getattr__(self, name): return 1\np = P()",
        "return n * p.s",
        ("return 1", "return 2"),
    ),
    ("helper of exec", "ns = {}\nexec('def h(n): return n + 1', ns)\nh = ns['h']", "return h(n)", ("n + 1", "n + 2")),
    ("function attribute", "def h(n): return n * h.s\nh.s = 1", "return h(n)", ("h.s = 1", "h.s = 2")),
    (
        "constant set in a function",
        "S = [1]\ndef setup(): S[0] = 1\nsetup()",
        "return n * S[0]",
        ("S[0] = 1", "S[0] = 2"),
    ),
    (
        "dict that the code also changes",
        "S = {'a': 1, 'calls': 0}",
        "S['calls'] += 1; return n * S['a']",
        ("'a': 1", "'a': 2"),
    ),
    (
        "object that the code also changes",
        "class P: pass\nC = P(); C.s = 1; C.n = 0",
        "C.n += 1; return n * C.s",
        ("C.s = 1", "C.s = 2"),
    ),
    (
        "self that the code also changes",
        (
            "class P:\n    def __init__(self, s): self.t, self.n = s, 0\n"
            "    def h(self): self.n += 1; return self.t\np = P(1)"
        ),
        "return p.h()",
        ("P(1)", "P(2)"),
    ),
    ("name of a parameter elsewhere", "S = {'a': 1}\ndef g(S): S['b'] = 1", "return n * S['a']", ("'a': 1", "'a': 2")),
    (
        "name of a parameter inside",
        "S = {'a': 1}",
        "\n    def inner(S): S['b'] = 0\n    inner({}); return n * S['a']",
        ("'a': 1", "'a': 2"),
    ),
    ("alias", "class P: pass\nC = P(); C.s = 1", "c = C; return n * c.s", ("C.s = 1", "C.s = 2")),
    ("numpy scalar", "import numpy as np\nW = np.float32(1)", "return n * W", ("(1)", "(2)")),
    ("Decimal", "from decimal import Decimal\nW = Decimal('1')", "return n * W", ("'1'", "'2'")),
    ("Fraction", "from fractions import Fraction\nW = Fraction(1)", "return n * W", ("(1)", "(2)")),
    ("range", "W = range(1)", "return n * len(W)", ("(1)", "(2)")),
    ("slice", "W = slice(1)", "return n[W]", ("(1)", "(2)")),
    ("bytearray", "W = bytearray(b'a')", "return n * W[0]", ("b'a'", "b'b'")),
    ("Path", "from pathlib import Path\nW = Path('a')", "return str(W)", ("'a'", "'b'")),
    ("re.Pattern", "import re\nW = re.compile('a')", "return W.pattern", ("'a'", "'b'")),
    ("flags of a re.Pattern", "import re\nW = re.compile('a', 0)", "return W.pattern", ("0", "re.I")),
    ("MappingProxyType", "from types import MappingProxyType as M\nW = M({'s': 1})", "return n * W['s']", ("1", "2")),
    (
        "defaultdict",
        "from collections import defaultdict\nW = defaultdict(int, {'s': 1})",
        "return n * W['s']",
        ("1", "2"),
    ),
    ("deque", "from collections import deque\nW = deque([1])", "return n * W[0]", ("[1]", "[2]")),
    ("array.array", "from array import array\nW = array('i', [1])", "return n * W[0]", ("[1]", "[2]")),
    ("itemgetter", "import operator\nW = operator.itemgetter(0)", "return W([n, n])", ("(0)", "(1)")),
    ("timedelta", "from datetime import timedelta\nW = timedelta(1)", "return n * W", ("(1)", "(2)")),
]


@pytest.mark.promise("edits-noticed")
@pytest.mark.parametrize("from_file", [True, False], ids=["file", "stdin"])
@pytest.mark.parametrize(("before", "body", "edit"), [row[1:] for row in EDITS], ids=[row[0] for row in EDITS])
def test_an_edit_is_noticed(programs, before, body, edit, from_file):
    text = program(before, body)
    assert edit[0] in text
    one, again, two = (programs.checksum(t, from_file=from_file) for t in (text, text, text.replace(*edit)))
    assert one == again
    assert one != two


FILES = {
    "helpers.py": "import other\ndef h(n): return n + C['s'] + other.f(n)\nS = 1\nC = {}\nC['s'] = 1\n",
    "other.py": "BLOCK = 64\ndef f(n):\n    return n * BLOCK\ndef unused(): pass\n",
    "package/inner.py": "from helpers import h\n",
    "package/__init__.py": "from .inner import h\n",
}
IMPORTS = {
    "from": program("", "from helpers import h; return h(n)"),
    "module": program("", "import helpers; return helpers.h(n)"),
    "in a helper": program("def g(n):\n    from helpers import h\n    return h(n)", "return g(n)"),
    "in a closure": program("", "import helpers\n    def inner(): return helpers.h(n)\n    return inner()"),
    "under another name": program("", "import helpers as m; return m.h(n)"),
    "of a package": program("", "from package.inner import h; return h(n)"),
    "of a package, whole": program("", "import package.inner; return package.inner.h(n)"),
    "of a package, again": program("", "from package import h; return h(n)"),
    "at the top": program("import helpers", "return helpers.h(n)"),
}


@pytest.mark.parametrize("loaded", [False, True], ids=["not loaded", "loaded"])
@pytest.mark.parametrize("text", IMPORTS.values(), ids=IMPORTS)
@pytest.mark.parametrize(
    ("file", "edit"),
    [
        ("helpers.py", ("n + C", "n - C")),
        ("helpers.py", ("C['s'] = 1", "C['s'] = 2")),
        ("other.py", ("BLOCK = 64", "BLOCK = 32")),
        ("other.py", ("n * BLOCK", "n // BLOCK")),
    ],
)
def test_an_edit_of_a_module_that_a_function_imports_is_noticed(programs, text, loaded, file, edit):
    text = f"import helpers, package.inner\n{text}" if loaded else text
    assert edit[0] in FILES[file]
    before, same = (programs.checksum(text, FILES) for _ in range(2))
    after = programs.checksum(text, {**FILES, file: FILES[file].replace(*edit)})
    assert before == same != after


@pytest.mark.parametrize("text", [text for name, text in IMPORTS.items() if name != "at the top"])
def test_it_does_not_matter_whether_an_imported_module_is_loaded_yet(programs, text):
    names = programs.run(f"{text}\ndef load():\n    import helpers, package.inner\n", FILES)
    before = code_checksum(names["k"])
    assert "helpers" not in sys.modules
    names["load"]()
    assert code_checksum(names["k"]) == before


@pytest.mark.parametrize("edit", [("def unused", "X = 1\ndef unused"), ("BLOCK = 64", "BLOCK = 64  # a comment")])
def test_other_parts_of_an_imported_module_do_not_count(programs, edit):
    other = FILES["other.py"].replace(*edit)
    assert programs.checksum(IMPORTS["from"], FILES) == programs.checksum(IMPORTS["from"], FILES | {"other.py": other})


def test_a_relative_import_is_followed(programs):
    inner = "def make():\n    def k(n):\n        from ..base import S\n        return n * S\n    return k\n"
    text = "from package.sub.inner import make\nk = make()\n"
    files = {"package/__init__.py": "", "package/sub/__init__.py": "", "package/sub/inner.py": inner}
    one, two = (programs.checksum(text, files | {"package/base.py": f"S = {n}"}) for n in (1, 2))
    assert one != two


@pytest.mark.parametrize(
    "text", ["import no_such_module; return no_such_module.f(n)", "from no_such_package.x import f; return f(n)"]
)
def test_a_module_that_does_not_exist_is_not_an_error(programs, text):
    assert programs.checksum(program("", text)) == programs.checksum(program("", text))


def test_a_library_that_a_function_imports_is_not_read(programs, monkeypatch):
    monkeypatch.setattr(source, "tree_of", lambda name: pytest.fail(f"read {name}"))
    body = "import numpy as np, json; from numpy.linalg import norm; return np.tanh(n) + norm(n) + json.dumps(n)"
    assert programs.checksum(program("", body))


def test_a_module_made_by_hand_counts_by_its_values(programs, monkeypatch):
    def checksum(value):
        made = types.ModuleType("made_by_hand")
        made.S = value
        monkeypatch.setitem(sys.modules, "made_by_hand", made)
        return programs.checksum(program("", "import made_by_hand; return n * made_by_hand.S"))

    assert checksum(1) == checksum(1) != checksum(2)


def test_a_module_attribute_that_a_function_computes_counts_by_the_function(programs):
    text = program("import helpers", "return n * helpers.Z")
    one, two = (programs.checksum(text, {"helpers.py": f"def __getattr__(name): return {n}"}) for n in (1, 2))
    assert one != two


def test_a_module_that_the_code_also_changes_still_counts(programs):
    text = program("import helpers", "helpers.calls = 1; return n * helpers.S")
    one, two = (programs.checksum(text, {"helpers.py": f"S = {n}"}) for n in (1, 2))
    assert one != two


def test_the_parts_of_an_object_that_speaks_for_itself_do_not_count(programs):
    text = program("class P:\n    s = 1\n    def __tunebook_checksum__(self): return 'p'\nC = P()", "return n * C.s")
    assert programs.checksum(text) == programs.checksum(text.replace("s = 1", "s = 2"))


# ------------------------------------------------------------------------------ changes of a running program


STATE = {
    "counter": ("count = 0", "global count\n    count += 1; return n + count"),
    "attribute of an object": ("class P: pass\ns = P(); s.n = 0", "s.n += 1; return n + s.n"),
    "attribute of an alias": ("class P: pass\ns = P(); s.n = 0", "t = s; t.n += 1; return n + t.n"),
    "attribute of a module": ("import helpers", "helpers.n = n; return helpers.n"),
    "item of a dict": ("s = {'n': 0, 'b': 2}", "s['n'] += n; return s"),
    "memo": ("memo = {}", "memo[n] = n; return memo"),
    "list": ("calls = []", "calls.append(n); return len(calls)"),
    "slice of a list": ("calls = [1, 2, 3]", "calls[1:] = [n]; return calls"),
    "default": ("", "return put(n)\ndef put(n, memo={}):\n    memo[n] = n; return memo"),
    "counter of a helper": ("calls = []\ndef h(n): calls.append(n)", "h(n); return len(calls)"),
    "counter of a helper's parameter": (
        "class P:\n    def __init__(self): self.n = 0\ns = P()\ndef bump(x): x.n += 1",
        "bump(s); return s.n",
    ),
    "counter of a method": (
        "class P:\n    def __init__(self): self.n = 0\n    def bump(self): self.n += 1; return self\ns = P()",
        "return use(s.bump())\ndef use(x):\n    return x.n + s.n",
    ),
    "counter of an object that is passed on": (
        "class P:\n    def __init__(self): self.n = 0\n    def bump(self): self.n += 1\ns = P()\ndef h(x): x.bump()",
        "h(s); return n",
    ),
    "counter of a class": ("class P:\n    n = 0\n    def bump(self): type(self).n += 1", "P().bump(); return P.n"),
    "dataclass": (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    n: int = 0\ns = P()\ndef h(x): return x",
        "s.n += 1; return h(s)",
    ),
    "lru_cache": ("import functools\n@functools.lru_cache\ndef h(n): return n", "return h(n)"),
    "cached_property": (
        (
            "import functools\nclass P:\n    @functools.cached_property\n    def s(self): return object()\np = P()\n"
            "def h(x): return x.s"
        ),
        "h(p); return p.s",
    ),
    "nonlocal": (
        "def make():\n    n = 0\n    def f():\n        nonlocal n\n        n += 1\n    return f\nf = make()",
        "f()",
    ),
    "unread attributes": (
        "import time\nclass P: pass\ns = P()\ndef h(x): return id(x)",
        "vars(s)['t'] = n; return h(s)",
    ),
}


@pytest.mark.parametrize("from_file", [True, False], ids=["file", "stdin"])
@pytest.mark.parametrize(("before", "body"), STATE.values(), ids=STATE)
def test_what_the_code_itself_changes_does_not_count(programs, before, body, from_file):
    names = programs.run(program(before, body), {"helpers.py": "n = 0"}, from_file=from_file)
    checksum = code_checksum(names["k"])
    for n in (3, 4):
        names["k"](n)
        assert code_checksum(names["k"]) == checksum


STABLE = """
import argparse, array, collections, decimal, enum, fractions, functools, operator, os, pathlib, re, sys, types, typing
if {first}:
    import helpers

class Mode(enum.Enum):
    FAST = "fast"
    SLOW = "slow"
class Flags(enum.Flag):
    A = 1
    B = 2
class Plain:
    registry = {{}}
    scale = 2 * 3
    def __init__(self, n): self.n, self.names, self.me = n, {{"x", "y", "z"}}, self
    def area(self): return self.n * self.scale + len(self.names) + len(self.registry)
class Slotted:
    __slots__ = ("a", "b")
    def __init__(self): self.a, self.b = object(), {{Mode.FAST: 1, Mode.SLOW: 2}}
class Generic(typing.Generic[typing.TypeVar("T")], Plain): pass
OBJECTS = [Plain(1), Slotted(), Generic(2), Mode.FAST, Flags.A | Flags.B, range(3), re.compile("x")]
OBJECTS += [decimal.Decimal("1.5"), types.SimpleNamespace(a={{"p", "q"}}), argparse.Namespace(b=1)]
OBJECTS += [fractions.Fraction(1, 3), pathlib.Path("a/b"), pathlib.Path(__file__).parent, collections.deque("ab"), len]
OBJECTS += [array.array("i", [1]), operator.itemgetter(1)]
OBJECTS += [types.MappingProxyType({{"k": object()}}), functools.partial(print, end=""), lambda x: x, object()]
NAMES = {{"a", "b", "c", "d"}}
def one(x): return x
def two(x): return x
BOTH = {{one, two, lambda x: -x, lambda x: +x}}
def kernel(x, mode=Mode.SLOW):
    import helpers
    from helpers import table
    try:
        return [f(x) for f in BOTH if NAMES and x in {{"p", "q", "r"}}], OBJECTS, Plain(3).area(), OBJECTS[0].me.n
    except ValueError as error:
        return helpers.f(x) + table["a"] + str(error)
class K:
    def __init__(self): self.calls, self.by = 0, lambda x: Mode
    def run(self, x):
        self.calls += 1
        return super().__repr__() + self.other(x) + str([self.by for _ in x])
    def other(self, x): return Mode.FAST.value + type(self).__name__
from tunebook._code.checksum import code_checksum, source_digest
first = code_checksum(kernel), source_digest(kernel), code_checksum(K().run)
print(*first)
import helpers
assert (code_checksum(kernel), source_digest(kernel), code_checksum(K().run)) == first
"""


def test_it_is_the_same_in_other_processes(tmp_path):
    """Other hash seeds, addresses, working folders, places of the file, orders of imports."""
    printed = set()
    for number in range(4):
        folder = tmp_path / f"{number}" / "project"
        folder.mkdir(parents=True)
        (folder / "helpers.py").write_text("table = {'a': {'x', 'y'}}\ndef f(x): return x\n")
        script = folder / "script.py"
        script.write_text(STABLE.format(first=number % 2, folder=str(folder)))
        env = {**os.environ, "PYTHONHASHSEED": str(number)}
        where = folder if number < 2 else tmp_path
        done = subprocess.run([sys.executable, script], cwd=where, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        printed.add(done.stdout)
    assert len(printed) == 1
    # The suite runs on several versions of Python, and all must agree.
    assert printed == {
        "54e2f2a22d2e2ab729654e793e746602 54e2f2a22d2e2ab729654e793e746602 658dc3424b15e670bbccb78f5b20b0aa\n"
    }


# ------------------------------------------------------------------------------------------- new objects of known code


@pytest.fixture
def walks(monkeypatch):
    """Return a list that gains an item with each walk."""
    done = []

    class Counted(checksum_module._CodeWalk):
        def digest(self):
            done.append(self)
            return super().digest()

    monkeypatch.setattr(checksum_module, "_CodeWalk", Counted)
    return done


def uncached(function: object) -> str:
    """Return the checksum of a function as a new process would."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksum_module, "_RECIPES", source.ByIdentity())
        return code_checksum(function)


LIVE = """
import functools, helpers, math, types
import numpy as np
S = 1
T = {"a": [1, 2], "b": {"c": (3, 4.0)}}
NS = types.SimpleNamespace(s=1)
SET = {1, 2}
W = np.zeros(3)
class B:
    def base(self): return 1
class P(B):
    scale = 2
    tile: int
    def __init__(self): self.n, self.inner = 1, {"x": [1]}
    def area(self): return self.n * self.scale + self.base() + len(self.inner["x"]) + self.more
    @property
    def more(self): return 1
    @staticmethod
    def plain(x): return x
p = P()
def inner(x, by=1, *, other=2): return x * S * by * other
def outer(x): return inner(x) + helpers.f(x) + P.plain(x)
def make(n, table): return lambda x: x + n + len(table) + outer(x)
f = make(1, [1])
def k(n):
    return outer(n), T, NS, SET, W, p.area(), p, f(n), len(str(n)), math.pi, [x for x in T["b"]["c"]]
"""
CHANGES = [
    "S = 2",
    "S = 1.0",
    "S = True",
    "T['a'][0] = 9",
    "T['a'].append(3)",
    "T['b']['c'] = (3, 4)",
    "T['z'] = 1",
    "del T['b']",
    "T['a'][0] = True",
    "T['b']['c'] = (3, -0.0)",
    "NS.s = 2",
    "NS.t = 1",
    "SET.add(3)",
    "W = np.zeros(4)",
    "P.scale = 3",
    "p.n = 2",
    "p.scale = 5",
    "p.inner['x'][0] = 2",
    "p.more_of = 1; p.inner = [1]",
    "P.area = lambda self: 1",
    "P.base = lambda self: 2",
    "p.area = lambda: 3",
    "P.plain = staticmethod(lambda x: -x)",
    "P.more = property(lambda s: 2)",
    "P.n = property(lambda self: 7)",
    "inner.__defaults__ = (3,)",
    "inner.__kwdefaults__ = {'other': 3}",
    "inner.__kwdefaults__ = {}",
    "inner.__code__ = outer.__code__",
    "inner = lambda x: x",
    "helpers.f = lambda x: -x",
    "helpers.T = 3",
    "f = make(2, [1])",
    "f = make(1, [1, 2])",
    "f = make(1, (1,))",
    "len = lambda x: 3",
    "p = B()",
    "del p.n",
    "math = types.SimpleNamespace(pi=3)",
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_in_the_running_program_is_noticed(programs, change):
    names = programs.run(LIVE, {"helpers.py": "T = 2\ndef f(x): return x * T\n"})
    before = code_checksum(names["k"])
    assert code_checksum(names["k"]) == before == uncached(names["k"])
    exec(change, names)
    after = code_checksum(names["k"])
    assert after == uncached(names["k"]) != before
    assert code_checksum(names["k"]) == after


@pytest.mark.parametrize("change", ["f = make(1, [1])", "p = P()", "T = {'a': [1, 2], 'b': {'c': (3, 4.0)}}", "S = 1"])
def test_an_equal_value_does_not_need_a_walk(programs, walks, change):
    names = programs.run(LIVE, {"helpers.py": "T = 2\ndef f(x): return x * T\n"})
    before, count = code_checksum(names["k"]), len(walks)
    exec(change, names)
    assert code_checksum(names["k"]) == before
    assert len(walks) == count > 0


def test_two_objects_that_were_one_are_noticed(programs):
    text = "class P:\n    def __init__(self): self.n = 1\n    def f(self): return self.n\na = b = P()\n"
    names = programs.run(program(text, "return a.f() + b.f()"))
    before = code_checksum(names["k"])
    exec("b = P(); b.n = 2", names)
    assert code_checksum(names["k"]) == uncached(names["k"]) != before


def closure_of(n, table=()):
    def kernel(x):
        return x * n + len(table)

    return kernel


ONE = closure_of(1)


def test_a_closure_that_is_made_again_is_not_walked_again(walks):
    first = [code_checksum(closure_of(n)) for n in (1, 2, 2.0, "2")]
    count = len(walks)
    assert len({*first}) == 4
    assert [code_checksum(closure_of(n)) for n in (1, 2, 2.0, "2")] == first
    assert source_digest(closure_of(1)) == source_digest(closure_of(1))
    assert len(walks) == count + 1


class Scaled(Kernel):
    """A kernel that programs make anew in each call."""

    block = 64

    def __init__(self, by, helper=ONE):
        super().__init__("tests.scaled")
        self.by = by
        self.helper = helper

    def run(self, x, *, cfg):
        return self._scaled(x) + self.helper(x)

    def _scaled(self, x):
        return x * self.by * self.block

    def heuristic_cfg(self, inv):
        return {"x": 1}


def test_an_instance_of_a_known_kernel_is_not_walked_again(walks):
    first = Scaled(2).code_checksum
    assert Scaled(2).code_checksum == first
    assert Scaled(2, closure_of(1)).code_checksum == first
    assert len(walks) == 1


@pytest.mark.parametrize("kernel", [lambda: Scaled(3), lambda: Scaled(2, closure_of(2)), lambda: Scaled(2.0)])
def test_an_instance_with_other_values_has_another_checksum(kernel):
    assert kernel().code_checksum == kernel().code_checksum != Scaled(2).code_checksum


@pytest.mark.parametrize(
    ("name", "value"),
    [("block", 32), ("run", lambda self, x, *, cfg: x), ("_scaled", lambda self, x: x), ("run_gpu", lambda self, x: x)],
)
def test_a_patched_class_is_noticed(monkeypatch, name, value):
    before = Scaled(2).code_checksum
    monkeypatch.setattr(Scaled, name, value, raising=False)
    assert Scaled(2).code_checksum != before
    monkeypatch.undo()
    assert Scaled(2).code_checksum == before


def test_a_heuristic_is_not_part_of_it(monkeypatch):
    before = Scaled(2).code_checksum
    monkeypatch.setattr(Scaled, "heuristic_cfg", lambda self, inv: {"x": 2})
    assert Scaled(2).code_checksum == before


def test_known_checksums_keep_nothing_alive():
    def make():
        class Local:
            def __init__(self):
                self.weights = np.zeros(3)

            def run(self, x):
                return helper(x) + self.weights

        def helper(x):
            return x

        owner = Local()
        code_checksum(owner.run)
        code_checksum(owner.run)
        return [weakref.ref(x) for x in (owner, owner.weights, Local, helper)]

    gone = make()
    gc.collect()
    assert [ref() for ref in gone] == [None] * 4


def test_a_parser_that_a_finaliser_entered_is_asked_again(programs, monkeypatch):
    names = programs.run(program("", "return n + 17"))
    real, failures = source._parsed, [SystemError("AST constructor recursion depth mismatch")]

    def parse(text, filename):
        if failures:
            raise failures.pop()
        return real(text, filename)

    monkeypatch.setattr(source, "_parsed", parse)
    assert source.node_of(names["k"]) is not None
    failures[:] = [SystemError("again")] * 9
    assert source.node_of(names["k"]) is None  # the checksum is then the one of the bytecode
