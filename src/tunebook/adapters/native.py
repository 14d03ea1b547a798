"""Kernels in C: compiled by the system's compiler with the configuration as macros, and called through ctypes.

    library = CLibrary(Path(__file__).with_name("saxpy.c"))

    @tunable(space=Space(UNROLL=[1, 2, 4, 8]), compile=library.compile, ignore=("a",))
    def saxpy(a, x, y, *, config):
        library(config).saxpy(ctypes.c_float(a), pointer(x), pointer(y), len(x))

Every item of a configuration becomes `-DNAME=value`, except `cflags`, a tuple of flags for the compiler.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from tunebook._arrays.device_fingerprint import device_fingerprint
from tunebook._base.errors import CompileError, DefinitionError, MissingDependency, with_article
from tunebook._base.vocabulary import computed_once
from tunebook.adapters._source.build_cache import BuildCache, PerConfig
from tunebook.adapters._source.c_source import Macros, complaint, digest, flags_of, macros_of, read_source

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tunebook._base.vocabulary import Json

__all__ = ["CLibrary", "macros_of", "pointer"]

# gcc before version 13 links start-up code into a library with one of these flags. When the library is loaded, the code
# makes the processor treat subnormal numbers as zero, in every computation of the process. Compiling alone does not.
_FAST_MATH: Final = frozenset({"-ffast-math", "-Ofast", "-funsafe-math-optimizations"})

_Memory: Final = ctypes.c_char * 0


@final
class CLibrary:
    """One C source, compiled and loaded once per configuration. Safe to share between threads and processes.

    `source` is C text, or the `Path` of a file, which is read here and now; headers beside it that it includes by
    `"name"` belong to it. `flags` go to the compiler in every configuration, behind the source, so that `-lm` works.
    `compiler=None` is the first of cc, gcc and clang on PATH. `cache` is a directory for compiled libraries; None is
    the user's book. A compiler that takes longer than `timeout_s` is stopped.

    ctypes passes numbers to C: a Python int as `int`, any other number in a ctypes type.
    """

    def __init__(
        self,
        source: str | Path,
        *,
        flags: Iterable[str] = ("-O3", "-march=native"),
        compiler: str | None = None,
        cache: str | os.PathLike[str] | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        self._source: Final = read_source(source)
        self._flags: Final = flags_of("flags", flags)
        self._compiler: Final = compiler
        self._timeout_s: Final = timeout_s
        self._builds: Final = BuildCache(None if cache is None else Path(cache))
        self._libraries: Final = PerConfig(self._load, macros_of)

    def __call__(self, config: Mapping[str, Any]) -> ctypes.CDLL:
        """Return the library of a configuration; compiled and loaded at the first call, found in 0.2 us later."""
        return self._libraries(config)

    def compile(self, config: Mapping[str, Any]) -> Path:
        """Return the compiled file of a configuration, without loading it."""
        return self._compile(macros_of(config))

    def compile_all(
        self, configs: Iterable[Mapping[str, Any]], threads: int | None = None
    ) -> list[Path | CompileError]:
        """Compile configurations, as many at once as there are cores; return a file or an error for each, in order."""

        def compile_or_error(config: Mapping[str, Any]) -> Path | CompileError:
            try:
                return self.compile(config)
            except CompileError as error:
                return error

        with ThreadPoolExecutor(threads or os.cpu_count() or 1, thread_name_prefix="tunebook-compile") as pool:
            return list(pool.map(compile_or_error, configs))

    def __tunebook_checksum__(self) -> str:
        """Return a digest of source, headers and flags: editing one of them makes it another kernel."""
        return digest([self._source.text, [*self._source.headers], [*self._flags]])

    def __tunebook_versions__(self) -> Mapping[str, str]:
        """Return the version of the compiler."""
        return {"C compiler": _identity(self._executable)}

    @computed_once
    def _executable(self) -> str:
        names = ("cc", "gcc", "clang") if self._compiler is None else (self._compiler,)
        found = next(filter(None, map(shutil.which, names)), None)
        if found is None:
            raise MissingDependency(
                f"kernels in C need a compiler, and {' or '.join(names)} is missing on PATH. "
                "Run: apt-get install gcc libc6-dev"
            )
        return found

    def _compile(self, macros: Macros, *, afresh: bool = False) -> Path:
        # With the processor: on another machine that shares this directory, -march=native means another processor.
        parts: list[Json] = [self.__tunebook_checksum__(), _identity(self._executable)]
        parts += [[*macros.definitions], [*macros.flags], device_fingerprint()]
        return self._builds.get(digest(parts), lambda path: self._run_compiler(macros, path), afresh=afresh)

    def _load(self, config: Mapping[str, Any]) -> ctypes.CDLL:
        macros = macros_of(config)
        with suppress(OSError):  # another process may have removed the file since it was checked
            return ctypes.CDLL(str(self._compile(macros)))
        path = self._compile(macros, afresh=True)  # a new file loads, or the error is real
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            raise CompileError(
                f"{self._source.name} compiles but cannot be loaded: {error} ({macros}). If its directory is mounted "
                "noexec, choose another one: CLibrary(cache=...)"
            ) from error

    def _run_compiler(self, macros: Macros, output: Path) -> None:
        text = f'#line 1 "{self._source.name}"\n{self._source.text}'
        flags = [*self._flags, *macros.flags]
        quoted = [] if self._source.directory is None else ["-iquote", str(self._source.directory)]
        source = [*(f"-D{definition}" for definition in macros.definitions), *quoted, "-x", "c", "-", "-x", "none"]
        if _FAST_MATH.isdisjoint(flags):
            self._ask_compiler(["-shared", "-fPIC", *source, *flags, "-o", str(output)], text, macros)
            return
        linked = [flag for flag in flags if flag not in _FAST_MATH]
        half_done = output.with_suffix(".o")
        try:
            self._ask_compiler(["-c", "-fPIC", *source, *flags, "-o", str(half_done)], text, macros)
            self._ask_compiler(["-shared", str(half_done), *linked, "-o", str(output)], "", macros)
        finally:
            half_done.unlink(missing_ok=True)

    def _ask_compiler(self, arguments: list[str], text: str, macros: Macros) -> None:
        returned, said = _run([self._executable, *arguments], text, self._timeout_s)
        if returned is None:
            late = f"{self._source.name}: the compiler took longer than {self._timeout_s:g} s"
            raise CompileError(complaint("", late, macros))
        if returned != 0:
            raise CompileError(complaint(said, f"{self._executable} ended with {returned}", macros))


@cache
def _identity(executable: str) -> str:
    """Return the compiler's version and target, without its name and path; 4 ms, once per process."""
    said = [_run([executable, option], "", 10.0)[1] for option in ("--version", "-dumpmachine")]
    version, machine = (next(iter(text.splitlines()), "") for text in said)
    return f"{version.removeprefix(Path(executable).name).strip()} {machine}"


def _run(command: Sequence[str], text: str, timeout_s: float) -> tuple[int | None, str]:
    """Run a command on a text; return its status, or None after a timeout, and its output."""
    with subprocess.Popen(  # noqa: S603 - the compiler that the user chose, without a shell
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
    ) as process:
        try:
            said, _ = process.communicate(text.encode("utf-8", "surrogateescape"), timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            if process.returncode is None:
                # The whole group: the compiler's children hold the pipes open, and we would wait for them.
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, said.decode("utf-8", "replace")


def pointer(array: Any) -> ctypes.Array[ctypes.c_char] | ctypes.c_void_p:
    """Return an array's memory as an argument for a C function that takes a pointer.

    For C-contiguous numpy arrays and other buffers; the argument keeps the array alive. It takes 0.2 us, and 4 us for a
    read-only array, which C must not write to.
    """
    try:
        return _Memory.from_buffer(array)
    except (TypeError, ValueError):
        pass  # read-only, or not contiguous, or not an array
    if getattr(array, "ctypes", None) is None:
        raise DefinitionError(
            f"{with_article(type(array).__name__)} has no memory that C could use; pass a numpy array"
        )
    if not array.flags.c_contiguous:
        raise DefinitionError(
            f"an array of shape {array.shape} and strides {array.strides} is not C-contiguous; "
            "pass numpy.ascontiguousarray(array)"
        )
    return array.ctypes.data_as(ctypes.c_void_p)  # type: ignore[no-any-return]


def __dir__() -> list[str]:
    return sorted(__all__)
