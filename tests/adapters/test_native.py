"""Kernels in C: real compilers, real processes."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from enum import Enum, IntEnum
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from limits import HANG_S

from tunebook import (
    CompileError,
    Config,
    DefinitionError,
    MissingDependency,
    Space,
    TunebookWarning,
    TuningFailed,
    report,
    tunable,
    tune,
)
from tunebook._code.checksum import code_checksum
from tunebook.adapters import native
from tunebook.adapters._source import build_cache
from tunebook.adapters.native import CLibrary, macros_of, pointer

TIMES_N = "int times(int x) { return x * N; }"
SUM = "float total(const float *x, int n) { float s = 0; for (int i = 0; i < n; i++) s += x[i]; return s; }"


def script(path, body):
    """A compiler that does something on the side whenever it compiles."""
    path.write_text(f'#!/bin/sh\ncase "$*" in *-shared*) {body};; esac\nexec cc "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def counting(tmp_path):
    """A compiler and a function that says how often it has compiled."""
    log = tmp_path / "compilations"
    log.touch()
    return script(tmp_path / "counting-cc", f"echo once >> {log}"), lambda: len(log.read_text().splitlines())


# ----------------------------------------------------------------------------------------------------------- macros


def test_the_items_of_a_configuration_are_macros():
    library = CLibrary("double f(int x) { return (double)(x * A + (B ? 1 : 0)) / C - D(4.0); }\n#include <math.h>")
    f = library({"A": -3, "B": True, "C": 0.5, "D": "sqrt", "cflags": ("-lm", "-include", "math.h")}).f
    f.restype = ctypes.c_double
    assert f(5) == (5 * -3 + 1) / 0.5 - 2


def test_cflags_come_after_the_flags_of_the_library():
    library = CLibrary("int f(void) { return A * 10 + B; }", flags=("-O3", "-DA=1", "-DB=1", "-UB"))
    assert library({"cflags": ("-DB=2",)}).f() == 12


class Word(str, Enum):  # noqa: UP042 - it prints as Word.FLOAT, which StrEnum would not
    FLOAT = "float"


class Size(IntEnum):
    BIG = 64


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "1"),
        (False, "0"),
        (-7, "-7"),
        (2**70, str(2**70)),
        (0.1, "0.1"),
        (1.0, "1.0"),
        (np.int64(3), "3"),
        (np.float32(0.5), "0.5"),
        ("unsigned char", "unsigned char"),
        ("", ""),
        (Word.FLOAT, "float"),
        (Size.BIG, "64"),
    ],
)
def test_a_value_is_written_as_c_reads_it(value, text):
    assert macros_of({"X": value}).definitions == (f"X={text}",)


@pytest.mark.parametrize("name", ["", "a b", "1st", "a-b", "é", "float", "defined", "a=b", 3])
def test_a_name_that_is_not_an_identifier_in_c_is_refused(name):
    with pytest.raises(DefinitionError, match="not an identifier in C"):
        macros_of({name: 1})


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "two\nlines", "nul\0", (1, 2), [1], 1j, b"x"])
def test_a_value_that_cannot_be_a_macro_is_refused(value):
    with pytest.raises(DefinitionError, match="cannot be a macro"):
        macros_of({"X": value})


@pytest.mark.parametrize("flags", ["-O2", ("-O2", 3), 7, ("",), (None,)])
def test_flags_must_be_a_tuple_of_flags(flags):
    with pytest.raises(DefinitionError, match="write a tuple of flags"):
        macros_of({"cflags": flags})
    with pytest.raises(DefinitionError, match="write a tuple of flags"):
        CLibrary(TIMES_N, flags=flags)


def test_a_configuration_that_is_not_a_mapping_is_refused():
    with pytest.raises(DefinitionError, match="as a mapping"):
        macros_of(64)


@given(
    st.dictionaries(
        st.from_regex("[A-Z_][A-Z0-9_]{0,9}", fullmatch=True),
        st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    )
)
def test_numbers_can_be_read_back_from_macros(config):
    pairs = [definition.split("=") for definition in macros_of(config).definitions]
    assert {name: type(config[name])(text) for name, text in pairs} == config


def test_equal_configurations_that_c_tells_apart_have_their_own_libraries():
    library = CLibrary("double half(void) { return 1 / N * 1.0; }")
    halves = []
    for config in (Config(N=2), Config(N=2.0), Config(N=2)):
        function = library(config).half
        function.restype = ctypes.c_double
        halves.append(function())
    assert halves == [0.0, 0.5, 0.0]


# ---------------------------------------------------------------------------------------------------------- compiling


def test_a_source_that_does_not_compile_names_the_line_and_the_configuration():
    library = CLibrary("int f(void) {\n  return N + unknown;\n}")
    with pytest.raises(CompileError, match=r"\Akernel\.c:2:\d+: error: .*\n  compiled with BLOCK=4 N=1 -O0\n"):
        library.compile({"N": 1, "BLOCK": 4, "cflags": ("-O0",)})


def test_an_error_behind_many_warnings_is_shown_first():
    library = CLibrary("\n".join(["#warning again"] * 50 + ['#error "N is odd"']))
    with pytest.raises(CompileError, match=r"\Akernel\.c:51:2: error: #error .N is odd.\n  compiled with N=3\b"):
        library({"N": 3})


def test_a_library_that_cannot_be_loaded_is_a_compile_error():
    library = CLibrary("int missing(int); int f(void) { return missing(1); }")
    with pytest.raises(CompileError, match=r"cannot be loaded: .*undefined symbol: missing"):
        library({})


def test_a_missing_compiler_ends_with_the_command_that_installs_one():
    with pytest.raises(
        MissingDependency, match=r"no-such-cc is missing on PATH\. Run: apt-get install gcc libc6-dev\Z"
    ):
        CLibrary(TIMES_N, compiler="no-such-cc").compile({"N": 1})


def test_a_compiler_that_hangs_is_stopped_with_its_children(tmp_path):
    # The child holds the pipe open for as long as it lives.
    library = CLibrary(TIMES_N, compiler=script(tmp_path / "slow-cc", f"sleep {10 * HANG_S}"), timeout_s=0.5)
    with pytest.raises(CompileError, match=r"took longer than 0\.5 s\n  compiled with N=1"):
        library({"N": 1})


def test_a_failing_candidate_fails_alone():
    library = CLibrary(f"#if N == 2\n#error two\n#endif\n{TIMES_N}")

    @tunable(space=Space(N=[1, 2, 3]), compile=library.compile, store=False)
    def kernel(x, *, config):
        return library(config).times(x) * 0

    failures = {m.config["v"]["N"]: m.failure for m in tune(kernel, 7).measurements}
    assert failures[1] is failures[3] is None
    assert (failures[2].kind, "error: #error two\n  compiled with N=2" in failures[2].message) == ("compile", True)


def test_all_failing_candidates_are_named():
    library = CLibrary("#error never")

    @tunable(space=Space(N=[1, 2]), compile=library.compile, store=False)
    def kernel(x, *, config):
        return library(config)

    with pytest.raises(TuningFailed, match="all 2 candidates failed") as caught:
        tune(kernel, 7)
    errors = [str(error).splitlines()[0] for error in caught.value.exceptions]
    assert errors == ["kernel.c:1:2: error: #error never"] * 2


def test_an_error_under_other_flags_is_the_same_failure_in_explain_and_in_the_report():
    library = CLibrary(f"#if N == 2\n#error two\n#endif\n{TIMES_N}")
    space = Space(N=[1, 2], cflags=[("-O0",), ("-O1",)])
    kernel = tunable(lambda x, *, config: library(config).times(x) * 0, name="k", space=space, compile=library.compile)
    tuned = tune(kernel, 7)
    (group,) = kernel.explain(7).failed
    assert (group.reason.partition(" (")[0], len(group.configs)) == (
        "compile: CompileError: kernel.c:2:2: error: #error two",
        2,
    )
    ((_, kind, _, count, _),) = report(tuned).model.failures
    assert (kind, count) == ("compile", 2)


def test_configurations_compile_at_the_same_time(tmp_path):
    # Each of the first four waits until all four have started: one after the other, they would wait for ever.
    wait = f"touch {tmp_path}/started.$$; while [ $(ls {tmp_path} | grep -c started) -lt 4 ]; do sleep 0.01; done"
    library = CLibrary(TIMES_N, compiler=script(tmp_path / "waiting-cc", wait))
    paths = library.compile_all([{"N": n} for n in range(8)], threads=4)
    assert len({path for path in paths if path.is_file()}) == 8


def test_compile_all_returns_an_error_for_each_configuration_that_failed():
    first, second, third = CLibrary("int f(void) { return A / N; }\n#if !N\n#error\n#endif").compile_all(
        [{"A": 1, "N": 1}, {"A": 1, "N": 0}, {"A": 2, "N": 1}]
    )
    assert isinstance(second, CompileError)
    assert first.is_file()
    assert third.is_file()


def test_threads_compile_and_load_a_configuration_once(counting):
    compiler, count = counting
    library, config = CLibrary(TIMES_N, compiler=compiler), Config(N=6)
    with ThreadPoolExecutor(8) as pool:
        loaded = set(pool.map(library, [config, Config(N=6), {"N": 6}] * 8))
    assert (len(loaded), count()) == (1, 1)
    assert library(config) is library({"N": 6})


def test_a_frozen_process_compiles_the_one_configuration_that_it_runs_into_its_home(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEBOOK_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TUNEBOOK_MODE", "frozen")
    library = CLibrary(TIMES_N)

    @tunable(space=[{"N": 2}, {"N": 3}], heuristic={"N": 3}, compile=library.compile)
    def kernel(x, *, config):
        return library(config).times(x)

    assert kernel(5) == 15
    (built,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert (built.parent, built.suffix) == (tmp_path / "home" / "native", ".so")


def test_overriding_every_call_does_not_grow_without_end(monkeypatch):
    library = CLibrary(TIMES_N)
    monkeypatch.setattr("tunebook.adapters._source.build_cache._REMEMBERED", 10)
    kept = [Config(N=1) for _ in range(25)]
    assert len({library(config) for config in kept}) == 1
    assert len(library._libraries._by_identity) <= 10


# ------------------------------------------------------------------------------------------------ source and checksum


def test_a_file_is_named_in_messages_and_its_headers_are_found(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "scale.h").write_text('#pragma once\n#include "base.h"\n#define SCALE (BASE * 10)\n')
    (tmp_path / "inner" / "base.h").write_text('#pragma once\n#include "scale.h"\n#define BASE 4\n')
    (tmp_path / "kernel file.c").write_text(
        '#include "inner/scale.h"\nint f(void) { return SCALE; }\n#ifdef BAD\n#error bad\n#endif\n'
    )
    library = CLibrary(tmp_path / "kernel file.c")
    assert library({}).f() == 40
    with pytest.raises(CompileError, match=r"\Akernel file\.c:4:2: error"):
        library({"BAD": 1})


def test_a_source_may_be_in_any_encoding(tmp_path):
    (tmp_path / "k.c").write_bytes(b'/* \xe9 */ const char *f(void) { return "\xe9\xff"; }')
    function = CLibrary(tmp_path / "k.c")({}).f
    function.restype = ctypes.c_char_p
    assert function() == b"\xe9\xff"


def test_a_missing_source_file_is_an_error_at_once(tmp_path):
    with pytest.raises(DefinitionError, match=r"cannot read the source .*nowhere\.c: No such file"):
        CLibrary(tmp_path / "nowhere.c")


def test_a_path_given_as_text_is_an_error_with_a_remedy():
    with pytest.raises(DefinitionError, match=r"write Path\('kernels/matmul\.c'\)"):
        CLibrary("kernels/matmul.c")


def kernel_of(library):
    @tunable(space=[{"N": 1}], store=False)
    def kernel(x, *, config):
        return library(config).times(x)

    return kernel.kernel


def test_editing_source_flags_or_header_makes_it_another_kernel_and_another_compiler_does_not(tmp_path):
    header, source = tmp_path / "n.h", tmp_path / "k.c"
    header.write_text("#define TWO 2\n")
    source.write_text('#include "n.h"\nint times(int x) { return x * TWO * N; }\n')
    other = tmp_path / "other-cc"
    other.write_text('#!/bin/sh\necho "another compiler 1.0"\n')
    other.chmod(0o755)

    checksums = [kernel_of(CLibrary(source)).code_checksum]
    checksums.append(kernel_of(CLibrary(source, flags=("-O1",))).code_checksum)
    elsewhere = kernel_of(CLibrary(source, compiler=str(other)))
    assert elsewhere.code_checksum == checksums[0]
    assert elsewhere.code_facts.versions["C compiler"].startswith("another compiler 1.0")
    header.write_text("#define TWO 22\n")
    checksums.append(kernel_of(CLibrary(source)).code_checksum)
    source.write_text('#include "n.h"\nint times(int x) { return x * TWO + N; }\n')
    checksums.append(kernel_of(CLibrary(source)).code_checksum)
    assert len(set(checksums)) == 4


def test_neither_the_place_of_a_source_nor_the_name_of_its_compiler_counts(tmp_path):
    (tmp_path / "a").mkdir()
    for place in (tmp_path, tmp_path / "a"):
        (place / "k.c").write_text(TIMES_N)
    alias = tmp_path / "my-cc"
    alias.symlink_to(Path(CLibrary(TIMES_N)._executable).resolve())
    checksums = {
        code_checksum(lambda library=library: library)
        for library in (CLibrary(tmp_path / "k.c"), CLibrary(tmp_path / "a" / "k.c", compiler=str(alias)))
    }
    assert len(checksums) == 1


# -------------------------------------------------------------------------------------------------------------- cache

PROCESS = """
import sys
from tunebook.adapters.native import CLibrary
print(CLibrary(sys.argv[1], compiler=sys.argv[2])({"N": int(sys.argv[3])}).times(7))
"""


def start(compiler, n):
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PROCESS, TIMES_N, compiler, str(n)], stdout=subprocess.PIPE, text=True
    )


def said(process):
    with process:
        return process.communicate()[0].strip()


def test_a_second_process_compiles_nothing(counting):
    compiler, count = counting
    assert [said(start(compiler, 5)), said(start(compiler, 5))] == ["35", "35"]
    assert count() == 1


def test_processes_may_compile_the_same_thing_at_once(counting, tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEBOOK_HOME", str(tmp_path / "book"))
    processes = [start(counting[0], 5) for _ in range(8)]
    assert [said(process) for process in processes] == ["35"] * 8
    (only,) = (tmp_path / "book" / "native").iterdir()
    assert only.suffix == ".so"


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:100],
        lambda content: content[:-1],
        lambda content: content[: len(content) // 2],
        lambda content: content[:500] + bytes([content[500] ^ 1]) + content[501:],
        lambda content: b"not a library",
        lambda content: content[-24:],
    ],
)
def test_a_damaged_library_is_built_again(counting, damage):
    compiler, count = counting
    path = CLibrary(TIMES_N, compiler=compiler).compile({"N": 3})
    path.write_bytes(damage(path.read_bytes()))
    assert CLibrary(TIMES_N, compiler=compiler)({"N": 3}).times(5) == 15
    assert count() == 2


def test_a_library_that_vanishes_is_built_again():
    library = CLibrary(TIMES_N)
    library.compile({"N": 3}).unlink()
    assert library({"N": 3}).times(5) == 15


def test_another_processor_has_its_own_libraries(monkeypatch):
    library = CLibrary(TIMES_N)
    here = library.compile({"N": 1})
    monkeypatch.setattr(native, "device_fingerprint", lambda: "cpu:another")
    assert library.compile({"N": 1}) != here


def test_a_directory_of_ones_own_choice_is_used(tmp_path):
    assert CLibrary(TIMES_N, cache=tmp_path / "mine").compile({"N": 1}).parent == tmp_path / "mine"


def test_a_directory_that_others_can_write_to_is_not_used(tmp_path):
    tmp_path.chmod(0o777)
    library = CLibrary(TIMES_N, cache=tmp_path)
    with pytest.warns(TunebookWarning, match=r"not kept for the next process: .* lets others write to it") as warned:
        assert [library({"N": n}).times(2) for n in (3, 4)] == [6, 8]
    assert len(warned) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_directory_found_safe_is_looked_at_again_after_a_second_and_not_for_each_configuration(tmp_path, monkeypatch):
    library, looks, distrust = CLibrary(TIMES_N, cache=tmp_path), [], build_cache.distrust
    monkeypatch.setattr(build_cache, "distrust", lambda place: looks.append(place) or distrust(place))
    monkeypatch.setattr(build_cache, "SAFE_S", HANG_S)
    kept = library.compile_all([{"N": n} for n in range(3)])
    looks.clear()
    assert library.compile_all([{"N": n} for n in range(3)]) == kept
    assert looks == []
    monkeypatch.setattr(build_cache, "SAFE_S", 0.0)
    library.compile({"N": 3})  # a build looks again in any case, and a second has passed since
    tmp_path.chmod(0o777)
    with pytest.warns(TunebookWarning, match="lets others write to it"):
        assert library.compile({"N": 0}) not in kept


def test_the_native_directory_of_a_book_must_be_safe_as_well(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEBOOK_HOME", str(tmp_path))
    (tmp_path / "native").mkdir()
    (tmp_path / "native").chmod(0o775)
    with pytest.warns(TunebookWarning, match="lets others write to it"):
        CLibrary(TIMES_N)({"N": 1})
    assert list((tmp_path / "native").iterdir()) == []


@pytest.mark.parametrize("place", ["/proc/nowhere", "a-file/inside"])
def test_where_nothing_can_be_written_it_works_for_this_process(tmp_path, place):
    (tmp_path / "a-file").touch()
    library = CLibrary(TIMES_N, cache=tmp_path / place)
    with pytest.warns(TunebookWarning, match="not kept for the next process") as warned:
        assert [library({"N": n}).times(2) for n in (3, 4)] == [6, 8]
    assert len(warned) == 1


def test_a_warning_of_a_thread_that_compiles_points_at_the_line_of_the_program():
    library = CLibrary(TIMES_N, cache="/proc/nowhere")
    times = tunable(
        lambda x, *, config: library(config).times(x), name="times", space=Space(N=[3]), compile=library.compile
    )
    with pytest.warns(TunebookWarning, match="not kept for the next process") as warned:
        tune(times, 2)
    assert {each.filename for each in warned} == {__file__}


def test_a_full_disk_is_one_warning(tmp_path, monkeypatch):
    def replace_file(path, *rest, **options):
        if path.parent == tmp_path:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, *rest, **options)

    real = build_cache.replace_file
    monkeypatch.setattr(build_cache, "replace_file", replace_file)
    library = CLibrary(TIMES_N, cache=tmp_path)
    with pytest.warns(TunebookWarning, match="No space left") as warned:
        assert [library({"N": n}).times(2) for n in (3, 4)] == [6, 8]
    assert len(warned) == 1


def test_a_library_that_cannot_be_kept_is_still_compiled_once(counting):
    compiler, count = counting
    library = CLibrary(TIMES_N, compiler=compiler, cache="/proc/nowhere")
    with pytest.warns(TunebookWarning, match="not kept"):
        library.compile({"N": 3})
    assert (library({"N": 3}).times(5), count()) == (15, 1)


def test_a_user_without_a_home_is_told_once(monkeypatch):
    monkeypatch.setattr(build_cache, "book_root", lambda: None)
    monkeypatch.delenv("TUNEBOOK_HOME")
    with pytest.warns(TunebookWarning, match=r"no home directory.*Set TUNEBOOK_HOME"):
        assert CLibrary(TIMES_N)({"N": 3}).times(2) == 6


def test_leftovers_and_the_longest_unused_libraries_are_removed(tmp_path, monkeypatch):
    for name, when in (("tmp-old", 1), ("old.so", 2), ("new.so", 3), ("unrelated", 1)):
        (tmp_path / name).write_bytes(b"x" * 100)
        os.utime(tmp_path / name, (when, when))
    (tmp_path / "tmp-new").touch()
    monkeypatch.setattr(build_cache, "MAX_BYTES", 150)
    built = CLibrary(TIMES_N, cache=tmp_path).compile({"N": 1})
    assert {path.name for path in tmp_path.iterdir()} == {"new.so", "unrelated", "tmp-new", built.name}


# ------------------------------------------------------------------------------------------------------------- arrays


@pytest.fixture(scope="module")
def total(tmp_path_factory):
    function = CLibrary(SUM, cache=tmp_path_factory.mktemp("native"))({}).total
    function.restype = ctypes.c_float
    return function


def test_c_sees_an_arrays_memory(total):
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert total(pointer(array), 12) == 66
    assert total(pointer(array[1:]), 8) == 60
    assert total(pointer(np.zeros((0, 3), np.float32)), 0) == 0


def test_an_array_that_is_read_only_can_be_read(total):
    array = np.ones(5, np.float32)
    array.flags.writeable = False
    assert total(pointer(array), 5) == 5


def test_a_pointer_keeps_its_array_alive(total):
    pointers = [pointer(np.full(1000, i, np.float32)) for i in range(50)]
    gc.collect()
    assert [total(p, 1000) for p in pointers] == [1000 * i for i in range(50)]


def test_a_pointer_may_be_declared_as_void(total):
    total.argtypes = [ctypes.c_void_p, ctypes.c_int]
    read_only = np.ones(2, np.float32)
    read_only.flags.writeable = False
    assert total(pointer(np.ones(2, np.float32)), 2) == total(pointer(read_only), 2) == 2
    total.argtypes = None


@pytest.mark.parametrize(
    "view", [lambda a: a.T, lambda a: a[:, ::2], lambda a: a[::-1], lambda a: np.broadcast_to(a, (2, 4, 4))]
)
def test_an_array_that_is_not_contiguous_is_refused(view):
    with pytest.raises(DefinitionError, match=r"not C-contiguous; pass numpy\.ascontiguousarray"):
        pointer(view(np.ones((4, 4), np.float32)))


@pytest.mark.parametrize("thing", [None, 3, [1.0], "text", np.float32(1), object()])
def test_an_object_without_memory_is_refused(thing):
    with pytest.raises(DefinitionError, match="has no memory that C could use; pass a numpy array"):
        pointer(thing)


@pytest.mark.parametrize("flag", ["-ffast-math", "-Ofast"])
def test_loading_a_library_made_with_fast_math_leaves_the_processes_arithmetic_alone(flag):
    code = f"""
from tunebook.adapters.native import CLibrary
library = CLibrary("double half(double x) {{ return x * 0.5; }}", flags=("-O2", {flag!r}))
library({{}}).half
assert 5e-324 * 1.0 != 0.0 and 2.3e-308 * 0.5 != 0.0, "subnormal numbers are treated as zero"
"""
    subprocess.run([sys.executable, "-c", code], check=True)
