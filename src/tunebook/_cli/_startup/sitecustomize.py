"""Runs at the start of each Python process under `tunebook run`, and waits for the libraries that can be taken over.

This folder is at the front of PYTHONPATH there. Nothing of tunebook is imported before the first launch of a kernel
that has an autotuner, so that other programs pay for one import of this file: 0.4 ms.
"""

from __future__ import annotations

import sys
from _thread import RLock

TYPE_CHECKING = False  # not from typing, which takes longer to load than the rest
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any


def _take_over_triton(_module: ModuleType) -> None:
    """Take over at the first launch: many programs import Triton, and few launch a kernel that has an autotuner."""
    autotuner: Any = sys.modules["triton.runtime.autotuner"].Autotuner
    theirs, lock = autotuner.run, RLock()
    taken: list[Any] = []

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if not taken:
            with lock:  # taking over is slow
                if not taken:
                    taken.append(take_over())
        return taken[0](kernel, *args, **kwargs)

    def take_over() -> Any:
        begin = _prepare("triton")
        wrapper, autotuner.run = autotuner.run, theirs
        begin()
        ours = autotuner.run
        if wrapper is not run:  # the program has put a method there that calls `run`
            autotuner.run = wrapper
        return ours

    autotuner.run = run


def _take_over_ejkernel(_module: ModuleType) -> None:
    _prepare("ejkernel")()


def _prepare(library: str) -> Callable[[], object]:
    """Return the function that takes a library over; if that is not possible, warn, and let it return at once."""
    try:
        from tunebook._cli._child import PREPARE  # noqa: PLC0415 - see the docstring above

        return PREPARE[library]()
    except ImportError as error:
        import warnings  # noqa: PLC0415 - as above

        warnings.warn(
            f"tunebook run: kernels of {library} keep their own tuner in {sys.executable}: {error}",
            RuntimeWarning,
            stacklevel=3,
        )
        return lambda: None


class _AfterImport:
    """A finder that calls a function after the import of a module; other finders find the module."""

    def __init__(self, functions: dict[str, Callable[[ModuleType], None]]) -> None:
        self._functions = functions
        self._asked: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self._functions or name in self._asked:
            return None
        self._asked.add(name)  # other finders of this kind ask all finders again
        try:
            specs = (f.find_spec(name, path, target) for f in sys.meta_path if f is not self)
            spec = next(filter(None, specs), None)
        finally:
            self._asked.discard(name)
        if spec is not None and spec.loader is not None:
            self._extend(spec.loader, name)
        return spec

    def _extend(self, loader: Any, name: str) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            function = self._functions.pop(name, None)
            if function is not None:
                function(module)

        loader.exec_module = exec_module  # of this one loader, which has no other module


def _run_next() -> None:
    """Run the `sitecustomize` that this one hides, as if this folder were not there."""
    sys.path[:] = [place for place in sys.path if not __file__.startswith(f"{place}/sitecustomize")]
    ours = sys.modules.pop(__name__)
    try:
        __import__(__name__)
    except ModuleNotFoundError as error:
        if error.name != __name__:
            raise
    finally:
        sys.modules.setdefault(__name__, ours)


if __name__ == "sitecustomize":
    waiting = {"triton": _take_over_triton, "ejkernel.ops": _take_over_ejkernel}
    sys.meta_path.insert(0, _AfterImport(waiting))  # type: ignore[arg-type] # Python calls no other method
    _run_next()
