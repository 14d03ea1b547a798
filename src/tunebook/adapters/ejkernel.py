"""Runs the operations of ejkernel on tunebook: `install()` is the only line that a program needs.

ejkernel's `Executor` asks a `ConfigSelectorChain` for the configuration of each call. `install` puts tunebook's
selector behind that one question. Arguments, gradients, labels and `shard_map` stay ejkernel's own code, so that an
operation computes the same as before.

The book replaces ejkernel's own files; `tunebook import --format ejkernel` reads those. A configuration that is given
with a call (`cfg=`) is used for that call alone; ejkernel stores it as if it had been tuned.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from tunebook._arrays.device_fingerprint import library_version
from tunebook._arrays.library import load_adapters
from tunebook._base.errors import require
from tunebook._base.vocabulary import computed_once
from tunebook._code.checksum import read_members
from tunebook._code.replay import CodeFacts
from tunebook._code.values import measured_names
from tunebook._hotpath.kernel_memo import KernelMemo
from tunebook._kernel.kernel import Invocation, Kernel
from tunebook._kernel.policy import AutotunePolicy
from tunebook._memo.answer_memo import ConfigCache
from tunebook._selection.persistent_cache import open_persistent
from tunebook._selection.selector import ConfigSelectorChain
from tunebook._tuning.plan import forward_autotune_only
from tunebook._tuning.tuner import Tuner
from tunebook.stores import announced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from functools import partial

__all__ = ["install", "selector_of", "uninstall"]

_FEATURE: Final = "running the operations of ejkernel on tunebook"
_ops = require("ejkernel.ops", feature=_FEATURE)
_selection = require("ejkernel.ops.config.selection", feature=_FEATURE)
_overlays = require("ejkernel.ops.config.cache", feature=_FEATURE)
_core = require("ejkernel.ops.core", feature=_FEATURE)

# The methods that are replaced, as ejkernel defines them.
_THEIR_CHOOSE: Final = _ops.ConfigSelectorChain.choose
_THEIR_HEURISTICS: Final = _ops.Executor._choose_heuristics_only  # noqa: SLF001 - asked for each call under this policy


def install() -> None:
    """Let tunebook choose the configurations of all ejkernel operations, also of modules imported before or later."""
    # Both take 50 ms, once. ejkernel opens its files when it is imported, so a first call finds everything open.
    load_adapters()
    announced()
    _ops.ConfigSelectorChain.choose = _choose
    _ops.Executor._choose_heuristics_only = lambda executor, inv, kernel: _choose(executor.chooser, inv, kernel)  # noqa: SLF001


def uninstall() -> None:
    """Let ejkernel choose again."""
    _ops.ConfigSelectorChain.choose = _THEIR_CHOOSE
    _ops.Executor._choose_heuristics_only = _THEIR_HEURISTICS  # noqa: SLF001


def selector_of(executor: Any) -> ConfigSelectorChain[Any]:
    """Return the selector that answers for one of ejkernel's executors, to read its cache, policy and events."""
    return _answerer(executor.chooser).selector


def kernel_of(kernel: Any) -> Kernel[Any, Any]:
    """Return one of ejkernel's kernels as a kernel of tunebook, for `selector_of(...).tune` and `tune_together`."""
    return _Adapted(kernel, may_guess=True, compares=True)


def _choose(chain: Any, inv: Any, kernel: Any) -> Any:
    """Return the configuration of a call; stands in for `ConfigSelectorChain.choose` of ejkernel."""
    if _overlays._cache_overlay.get():  # noqa: SLF001 - keyed as ejkernel keys
        return _THEIR_CHOOSE(chain, inv, kernel)
    return _answerer(chain).choose(inv, kernel)


def _answerer(chain: Any) -> _Answerer:
    found: _Answerer = vars(chain).get("_tunebook") or vars(chain).setdefault("_tunebook", _Answerer(chain))
    return found


class _Answerer:
    """Answers for one of ejkernel's selectors."""

    def __init__(self, chain: Any) -> None:
        self._chain = chain
        tuner = Tuner(warmup=getattr(chain.tuner, "warmup", 1), iters=getattr(chain.tuner, "iters", 3))
        book = None if chain.persistent is None else open_persistent("ejkernel", None)
        self.selector: Final[ConfigSelectorChain[Any]] = ConfigSelectorChain(
            ConfigCache(), self._policy(), tuner, book, chain.persist_autotune, chain.on_event
        )
        self._memo: Final = KernelMemo(self.selector)
        self._told = chain.on_event

    def choose(self, inv: Any, kernel: Any) -> Any:
        found = None if self._news() else self._memo.find(inv, kernel)
        return self._select(inv, kernel) if found is None else found

    def _news(self) -> bool:
        """Return whether the listener of the chain was replaced."""
        return self._chain.on_event is not self._told

    def _select(self, inv: Any, kernel: Any) -> Any:
        if self._news():
            self.selector.on_event = self._told = self._chain.on_event
        wanted = self._policy()
        if self.selector.policy != wanted:
            self.selector.policy = wanted
        ours: Invocation[Any, Any] = Invocation(
            inv.op_id, inv.args, inv.kwargs, override_cfg=inv.override_cfg, batch_axes=inv.batch_axes,
            method=inv.method, mesh=inv.mesh, in_specs=inv.in_specs, out_specs=inv.out_specs, check_vma=inv.check_vma,
        )  # fmt: skip
        gradients = _measures_gradients(inv, kernel)
        adapted = _Adapted(
            kernel, may_guess=wanted.allow_heuristics, compares=not (gradients and wanted.validate_backward)
        )
        with nullcontext() if gradients else forward_autotune_only():
            config, _ = self._memo.choose(ours, adapted)
            if adapted.lacks_gradient:
                # Asked again, the heuristic answers at once, and the answer is memoised: a failure is not.
                config, _ = self._memo.choose(ours, adapted)
        return config

    def _policy(self) -> AutotunePolicy:
        theirs = self._chain.policy
        return AutotunePolicy(
            theirs.allow_autotune, theirs.allow_heuristics, theirs.cache_miss_fallback, theirs.validate_backward
        )


def _measures_gradients(inv: Any, kernel: Any) -> bool:
    if not _selection._is_backward_autotune_enabled():  # noqa: SLF001 - set by their `forward_autotune_only`
        return False
    return inv.method != "shard_map" or getattr(kernel, "supports_grad_validation", False)


class _Adapted(Kernel[Any, Any]):
    """A kernel of ejkernel as a kernel of tunebook."""

    def __init__(self, theirs: Any, *, may_guess: bool, compares: bool) -> None:
        super().__init__(theirs.op_id, theirs.version, theirs.key_builder)
        self._theirs, self._may_guess, self._compares = theirs, may_guess, compares
        self.lacks_gradient = False

    @property
    def module(self) -> str:
        return type(self._theirs).__module__

    def variant(self, name: str, inv: Invocation[Any, Any]) -> Callable[..., Any]:
        found = _core._get_platform_method(self._theirs, name, inv.platform, inv.method)  # noqa: SLF001 - their rule
        return found or getattr(self._theirs, name)  # type: ignore[no-any-return]

    def has_backward(self, inv: Invocation[Any, Any]) -> bool:
        return bool(_core._has_custom_vjp(self._theirs, inv.platform, inv.method))  # noqa: SLF001 - their rule

    def create_shard_map_wrapper(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        cfg = cast("partial[Any]", fn).keywords["cfg"]  # theirs takes the configuration, and finds the function itself
        return self._theirs.create_shard_map_wrapper(*args, cfg=cfg, **kwargs)  # type: ignore[no-any-return]

    def heuristic(self, inv: Invocation[Any, Any]) -> Any:
        try:
            return self.variant("heuristic_cfg", inv)(inv)
        except NotImplementedError:
            return None

    def candidates(self, inv: Invocation[Any, Any]) -> Iterable[Any]:
        found = tuple(super().candidates(inv))
        # With one candidate there is nothing to measure. The heuristic gives the same answer, if it is asked.
        nothing = self.lacks_gradient or found == (self.heuristic(inv),)
        return () if self._may_guess and nothing else found

    def measures_without_gradient(self) -> bool:
        self.lacks_gradient = True
        return False  # as in ejkernel: such a candidate fails

    def baseline(self, inv: Invocation[Any, Any]) -> Any:
        heuristic = self.heuristic(inv)
        # ejkernel measures its candidates alone. Here a heuristic of another kind is the model for their outputs, which
        # are compared where only the forward pass is measured.
        return heuristic if self._compares or heuristic in self.candidates(inv) else None

    @computed_once
    def code_facts(self) -> CodeFacts:
        kind = type(self._theirs)
        if kind.__module__.partition(".")[0] == "ejkernel" and _is_installed():
            # Its operations find their implementations by name at run time, which reading their code does not show.
            return CodeFacts(f"ejkernel {library_version('ejkernel')}")
        return read_members(self._theirs, _measured_names, version=self.version)


def _measured_names(kernel: object, _: None) -> tuple[str, ...]:
    return measured_names(kernel, _ops.Kernel)


def _is_installed() -> bool:
    """Return whether ejkernel is a release in a package directory, and not a checkout that is being edited."""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(_ops.__file__).parts)


def __dir__() -> list[str]:
    return sorted(__all__)
