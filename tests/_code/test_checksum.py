from __future__ import annotations

import importlib.util
import itertools
import linecache
import os
import pickle
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, partial, wraps
from importlib import metadata
from types import ModuleType, SimpleNamespace

import numba
import numpy as np
import pytest

import tunebook as tb
from tunebook._base.config_codec import fingerprint
from tunebook._base.errors import CodecError, DefinitionError
from tunebook._code import source as source_module
from tunebook._code.checksum import candidates_checksum, code_checksum, read_code, source_digest
from tunebook._code.values import text_of
from tunebook._space.space import Config, Space

HELPERS = """
    STEP = 4
    def tile(x):
        return x // STEP
    class Shape:
        def area(self):
            return 1
"""

KERNEL = """
    import helpers
    from helpers import Shape
    BLOCK = 64
    TABLE = {"a": [1, 2]}
    def inner(x):
        return x + BLOCK
    def outer(x):
        return inner(x) * 2
    def kernel(a, b, scale=2.0, *, config=None):
        return outer(a) + helpers.tile(b) + Shape().area() + TABLE["a"][0]
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Return a function that writes modules to a new folder, imports them and returns the last one."""
    numbers = itertools.count()

    def load(**sources: str):
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        for name, text in sources.items():
            path = folder / f"{name}.py"
            path.write_text(textwrap.dedent(text))
            spec = importlib.util.spec_from_file_location(name, path)
            module = importlib.util.module_from_spec(spec)
            monkeypatch.setitem(sys.modules, name, module)
            spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def checksum(load):
    return lambda text, helpers=HELPERS: code_checksum(load(helpers=helpers, kernels=text).kernel)


@pytest.mark.promise("edits-noticed")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return outer(a)", "return 1 + outer(a)"),
        ("scale=2.0", "scale=3.0"),
        ("scale=2.0", "scale=2"),
        ("BLOCK = 64", "BLOCK = 32"),
        ("BLOCK = 64", "BLOCK = 64.0"),
        ("return x + BLOCK", "return x - BLOCK"),
        ("inner(x) * 2", "inner(x) * 3"),
        ('{"a": [1, 2]}', '{"a": [3, 2]}'),
        ("a, b, scale", "a, b, /, scale"),
        ("def inner(x):", "def inner(x, unused=1):"),
    ],
)
def test_editing_the_kernel_a_helper_a_constant_or_a_default_changes_it(checksum, old, new):
    assert old in KERNEL
    assert checksum(KERNEL.replace(old, new)) != checksum(KERNEL)


@pytest.mark.promise("edits-noticed")
@pytest.mark.parametrize(
    ("old", "new"), [("STEP = 4", "STEP = 8"), ("x // STEP", "x % STEP"), ("return 1", "return 2")]
)
def test_editing_a_helper_in_another_module_changes_it(checksum, old, new):
    assert checksum(KERNEL, HELPERS.replace(old, new)) != checksum(KERNEL)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def kernel", "# a comment\n\n\n    def kernel"),
        ("return outer(a)", '"""A docstring."""\n        return outer(a)'),
        ("return x + BLOCK", 'r"""Another."""\n        # more\n        return (x+BLOCK)'),
        ("BLOCK = 64", "BLOCK = 0x40"),
        ('{"a": [1, 2]}', '{"a": [1, 3], "b": 4}'),
        ("def inner", "def unused():\n        pass\n    UNUSED = 3\n    def inner"),
        ("(a, b, scale=2.0, *, config=None)", "(\n        a,\n        b,\n        scale=2.0, *, config=None,\n    )"),
    ],
)
def test_comments_docstrings_formatting_and_unrelated_code_do_not_change_it(checksum, old, new):
    assert old in KERNEL
    assert checksum(KERNEL.replace(old, new)) == checksum(KERNEL)


def test_moving_the_file_does_not_change_it(checksum):
    assert checksum(KERNEL) == checksum(KERNEL)


def test_the_version_and_extra_values_are_part_of_it(load):
    kernel = load(helpers=HELPERS, kernels=KERNEL).kernel
    assert len({code_checksum(kernel), code_checksum(kernel, version="2"), code_checksum(kernel, extra=["-O3"])}) == 3


def test_swapping_the_values_of_two_names_changes_it(load):
    text = """
        def add(x): return x + 1
        def mul(x): return x * 2
        first, second = {}
        def kernel(x): return first(second(x))
    """
    one, two = (load(kernels=text.replace("{}", pair)).kernel for pair in ("add, mul", "mul, add"))
    assert code_checksum(one) != code_checksum(two)


def test_it_is_the_same_in_another_process_with_another_hash_seed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        from tunebook._code.checksum import code_checksum
        NAMES = {"a", "b", "c", "d"}
        def one(x): return x
        def two(x): return x
        BOTH = {one, two, lambda x: 1, lambda x: 2}
        def kernel(x): return [f(x) for f in BOTH if NAMES and x in {"p", "q", "r"}]
        print(code_checksum(kernel))
        """)
    )

    def run(seed: int) -> str:
        env = {**os.environ, "PYTHONHASHSEED": str(seed)}
        return subprocess.run([sys.executable, script], check=True, capture_output=True, text=True, env=env).stdout

    assert len({run(seed) for seed in range(4)}) == 1


def test_it_is_the_same_for_every_python_version(load):
    # A golden value: the suite runs on several versions of Python, and all must agree on the text of a function.
    text = """
        LIMIT = 3
        def kernel(a, /, b: int = 1, *rest, c=None, **more):
            '''Docstring.'''
            with a as x, b:
                y = [f"{i!r:>{LIMIT}}" for i, *_ in rest if (z := i) > LIMIT]
            try:
                async_ = lambda *, k=1: (yield k)
            except* ValueError as error:
                del more[c:LIMIT, ...]
            match b:
                case {"k": [1, *others], **kw} if others: pass
            return -x ** 2 @ y < 1.5e300 <= 1j and not b"bytes"
    """
    assert code_checksum(load(kernels=text).kernel) == "cd6a303c54b4834121ea7daf0b37fc54"


# ------------------------------------------------------------------------------------------- finding the right source


def test_two_lambdas_on_one_line_differ():
    one, two = (lambda x: x + 1), (lambda x: x + 2)
    assert code_checksum(one) != code_checksum(two)


def test_a_lambda_is_told_from_the_lambda_around_it():
    outer = lambda x: lambda y: x + y  # fmt: skip
    assert code_checksum(outer) != code_checksum(outer(1))
    assert text_of(outer) == "lambda x: lambda y: x + y"
    assert text_of(outer(1)) == "lambda y: x + y"


def test_lambdas_are_found_by_their_columns():
    fs = [lambda a: a, lambda b: (b, b), lambda c=(lambda d: d): c]  # fmt: skip
    found = [text_of(f) for f in (*fs, fs[2]())]
    assert found == ["lambda a: a", "lambda b: (b, b)", "lambda c=lambda d: d: c", "lambda d: d"]


def test_lambdas_that_return_constants_differ():
    fs = [lambda: 1, lambda: 2, lambda: 1.0, lambda: "1", lambda: (1, 2), lambda: (1, 2.0), lambda x: 1]  # fmt: skip
    assert len({code_checksum(f) for f in fs}) == len(fs)


def test_equal_lambdas_in_other_places_are_equal():
    one = [lambda x: x + 1, "padding"][0]
    two = lambda x: x + 1
    assert code_checksum(one) == code_checksum(two)


def test_functions_that_differ_only_in_their_closures_differ():
    def make(n):
        return lambda x: x + n

    assert code_checksum(make(1)) != code_checksum(make(2))
    assert code_checksum(make(1)) == code_checksum(make(1))


def test_code_without_source_is_told_apart_by_its_bytecode():
    def compiled(text):
        names = {"__name__": "made_up"}
        exec(text, names)
        return names["f"]

    assert code_checksum(compiled("def f(x): return x + 1")) == code_checksum(compiled("\n\ndef f(x): return x + 1"))
    texts = ["def f(x): return x + 1", "def f(x): return x + 2", "def f(x): return x.a", "def f(x): return x.b"]
    assert len({code_checksum(compiled(text)) for text in texts}) == len(texts)


def test_a_file_edited_after_its_import_is_not_believed(load):
    module = load(kernels="def kernel(x):\n    return x + 1\n")
    before = code_checksum(module.kernel)
    path = module.__file__
    with open(path, "w") as file:  # noqa: PTH123 - as an editor does
        file.write("def kernel(x):\n    return x * 1000\n")
    linecache.checkcache(path)
    assert source_module.node_of(module.kernel) is None
    assert code_checksum(module.kernel) == before  # the code that runs is the same
    module.__spec__.loader.exec_module(module)
    assert code_checksum(module.kernel) != before


# -------------------------------------------------------------------------------------------------- kinds of things


def test_cycles_end():
    def even(n):
        return n == 0 or odd(n - 1)

    def odd(n):
        return n != 0 and even(n - 1)

    loop = []
    loop.append(loop)
    assert code_checksum(even) == code_checksum(even)
    assert code_checksum(even) != code_checksum(odd)
    assert code_checksum(lambda: loop)


def decorated(function):
    @wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


def test_deep_code_does_not_exceed_the_recursion_limit(load):
    branches = "    if x == 0: return 0\n" + "".join(f"    elif x == {n}: return {n}\n" for n in range(80))
    one, two = (
        load(kernels=f"def kernel(x):\n{branches}    return {' + '.join(['x'] * n)}\n").kernel for n in (900, 901)
    )
    assert source_module.node_of(one) is not None
    assert code_checksum(one) != code_checksum(two)


def test_a_function_that_claims_to_wrap_itself_does_not_loop():
    def f(x):
        return x

    f.__wrapped__ = f
    assert code_checksum(f) == code_checksum(f)


def test_wrapped_functions_are_followed():
    def make(n):
        def f(x):
            return x + n

        return f

    wraps_of = [lambda f: f, decorated, lru_cache, partial, lambda f: partial(min, key=f), numba.njit, staticmethod]
    for wrap in wraps_of:
        assert code_checksum(wrap(make(1))) != code_checksum(wrap(make(2)))
        assert code_checksum(wrap(make(1))) == code_checksum(wrap(make(1)))
    assert len({code_checksum(wrap(make(1))) for wrap in wraps_of}) == len(wraps_of)


def test_the_function_inside_a_triton_kernel_is_followed():
    class JITFunction:  # as triton's: the function is kept under .fn
        def __init__(self, fn):
            self.fn = fn

        def __call__(self):
            raise NotImplementedError

    one, two = JITFunction(lambda x: x + 1), JITFunction(lambda x: x + 2)
    assert code_checksum(one) != code_checksum(two)


def test_tunebooks_own_decorator_is_not_part_of_the_kernel(load):
    text = """
        import {}
        def make():
            def tunable(space): return lambda f: f
            @tunable(space={})
            def inner(x): return x
            return inner
        @{}.lru_cache(maxsize={})
        def outer(x): return x
        inner, outer = make(), outer.__wrapped__
    """
    # Any name of tunebook's will do; this one is also to be had elsewhere, where it counts.
    one, two, other, another = (
        load(kernels=textwrap.dedent(text).format(module, n, module, n))
        for module in ("tunebook._code.source", "functools")
        for n in (1, 2)
    )
    assert code_checksum(one.outer) == code_checksum(two.outer)
    assert code_checksum(other.outer) != code_checksum(another.outer)
    assert code_checksum(one.inner) == code_checksum(two.inner)


def test_constants_given_to_decorators_count(load):
    text = """
        def option(n): return lambda f: f
        FAST = {}
        @option(FAST)
        def kernel(x): return x
    """
    assert len({code_checksum(load(kernels=text.replace("{}", n)).kernel) for n in ("True", "False")}) == 2


def test_methods_reach_the_other_methods_they_call(load):
    text = """
        class Base:
            def run(self, x): return x
        class Kernel(Base):
            scale = 2
            def __init__(self, n): self.n = n
            def run(self, x): return self.helper(x) + self.n + super().run(x) + self.scale
            def helper(self, x): return x + 1
            def candidates(self): return [1, 2]
    """

    def checksum(old="", new="", n=1):
        return code_checksum(load(kernels=text.replace(old, new)).Kernel(n).run)

    assert checksum("x + 1", "x + 2") != checksum()
    assert checksum("return x\n", "return -x\n") != checksum()
    assert checksum("scale = 2", "scale = 3") != checksum()
    assert checksum(n=2) != checksum()
    assert checksum("[1, 2]", "[1, 2, 3]") == checksum()  # a candidate more leaves measurements valid


def test_classes_count_by_their_source_and_their_bases(load):
    text = """
        from dataclasses import dataclass
        from enum import Enum
        class Mode(Enum):
            FAST = 1
        class Base:
            def f(self): return 1
        @dataclass
        class Options(Base):
            '''Docstring.'''
            tile: int = 4
            mode: Mode = Mode.FAST
            def g(self): return helper()
        def helper(): return 5
        def kernel(x): return Options().g() + Mode.FAST.value
    """
    edits = [
        ("tile: int = 4", "tile: int = 8"),
        ("return 1", "return 2"),
        ("return 5", "return 6"),
        ("FAST = 1", "FAST = 2"),
    ]
    found = {code_checksum(load(kernels=text.replace(*edit)).kernel) for edit in edits}
    plain = code_checksum(load(kernels=text).kernel)
    assert len(found - {plain}) == len(edits)
    assert code_checksum(load(kernels=text.replace("Docstring.", "Other.")).kernel) == plain


def test_state_that_the_code_changes_does_not_count_as_a_constant(load):
    text = """
        calls, memo, count, stats = [], {}, 0, type("Stats", (), {})()
        stats.n = 0
        def kernel(x):
            global count
            count += 1
            calls.append(x)
            memo[x] = x
            stats.n += 1
            return x
    """
    module = load(kernels=text)
    before = code_checksum(module.kernel)
    module.kernel(3)
    assert code_checksum(module.kernel) == before


def test_arrays_count_by_their_description():
    def make(table):
        return lambda i: table[i]

    zeros, ones, more = np.zeros(3), np.ones(3), np.zeros(4)
    assert code_checksum(make(zeros)) == code_checksum(make(ones)) != code_checksum(make(more))


def test_installed_packages_count_by_name_and_their_versions_are_facts_of_their_own(monkeypatch):
    kernel = lambda x: 1 + np.tanh(x)
    before, digest = read_code(kernel), source_digest(kernel)
    assert before.versions == {"numpy": np.__version__}
    monkeypatch.setattr(np, "__version__", "0.1")
    assert read_code(kernel) == (before.checksum, {"numpy": "0.1"})
    assert source_digest(kernel) == digest


def test_a_package_that_the_code_imports_while_it_runs_has_a_version_loaded_or_not(monkeypatch):
    def kernel():
        import pytest_timeout

        return pytest_timeout

    monkeypatch.delitem(sys.modules, "pytest_timeout", raising=False)
    before = read_code(kernel)
    assert before.versions == {"pytest_timeout": metadata.version("pytest_timeout")}
    monkeypatch.setitem(sys.modules, "pytest_timeout", ModuleType("pytest_timeout"))
    assert read_code(kernel) == before


def test_an_object_may_speak_for_itself():
    def make(text):
        speaker = SimpleNamespace(__tunebook_checksum__=lambda: text)
        return lambda: speaker

    assert code_checksum(make("1")) != code_checksum(make("2"))
    with pytest.raises(DefinitionError, match="must return a str, not int"):
        code_checksum(make(3))


def test_builtins_are_told_apart_by_name():
    assert code_checksum(len) != code_checksum(max)
    assert code_checksum(np.add) != code_checksum(np.multiply)


# ------------------------------------------------------------------------------------------------------- candidates


class Mode(Enum):
    FAST = 1


@dataclass(frozen=True)
class Tiles:
    m: int
    mode: Mode = Mode.FAST


def test_candidates_are_a_set():
    a, b, c = Tiles(1), Config(m=1), {"m": (1, 2)}
    assert candidates_checksum([a, b, c]) == candidates_checksum(iter([c, b, a, a]))
    assert candidates_checksum([a, b]) != candidates_checksum([a, b, c])
    assert candidates_checksum([1]) != candidates_checksum([True]) != candidates_checksum([1.0])


def test_a_space_speaks_for_itself():
    space = Space(m=[1, 2])
    assert candidates_checksum(space) == space.fingerprint()


def test_a_candidate_that_cannot_be_written_is_a_clear_error():
    with pytest.raises(CodecError, match="cannot store"):
        candidates_checksum([object()])


def test_a_config_fingerprint_survives_pickling():
    config = Config(m=1, n="x")
    assert fingerprint(pickle.loads(pickle.dumps(config))) == fingerprint(config)


def test_an_object_may_speak_for_its_versions(monkeypatch):
    speaker = SimpleNamespace(__tunebook_checksum__=lambda: "1", __tunebook_versions__=lambda: {"compiler": "2"})
    kernel = lambda: speaker
    before = read_code(kernel)
    assert before.versions == {"compiler": "2"}
    speaker.__tunebook_versions__ = lambda: {"compiler": "3"}
    assert read_code(kernel) == (before.checksum, {"compiler": "3"})


@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: tb.choice(slow=f)])
def test_another_release_of_numba_is_another_version_and_not_other_code(monkeypatch, wrap):
    compiled = numba.njit(lambda x: x + 1)

    def kernel(x):
        return compiled(x)

    def plain(x):
        return x + 1

    assert "numba" not in read_code(plain).versions
    before = read_code(wrap(kernel))
    assert before.versions["numba"] == numba.__version__
    monkeypatch.setattr(numba, "__version__", f"{numba.__version__}.1")
    after = read_code(wrap(kernel))
    assert after.checksum == before.checksum
    assert after.versions["numba"] == numba.__version__
