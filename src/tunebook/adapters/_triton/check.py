"""Checks the outputs of Triton kernels: the tensors that a candidate leaves behind, against a reference's.

`triton.autotune` checks nothing, and neither does `autotune` without `check=` or `reference=`: copies of all tensors
take memory, and a comparison per candidate takes time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import triton

from tunebook._base.config_codec import fingerprint
from tunebook._base.errors import DefinitionError, TuningFailed, warn_once
from tunebook._kernel.output_check import Comparison, Mismatch, as_mismatch, comparison
from tunebook._measure.stopwatch import Attempt
from tunebook.adapters._triton.candidate import LaunchConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tunebook._kernel.output_check import Compare, Tolerance
    from tunebook.adapters._triton.candidate import Launch, SavedTensors

Reference: TypeAlias = "Literal['first'] | triton.Config | Callable[..., Any]"

# The tensors after the reference's run are kept, beside the copies that put them back. They may take this part of the
# free memory.
_PART_OF_FREE = 0.25
_FIRST = "first"


class OutputCheck(NamedTuple):
    """How the outputs of a kernel are checked. Made by `output_check`."""

    reference: Reference
    compare: Compare
    options: tuple[object, ...]  # as the author gave them: a choice that passed other ones is verified


def output_check(
    reference: Reference | None,
    check: bool | str | Compare | None,  # noqa: FBT001 - as the user wrote it
    tolerance: Tolerance | None,
) -> OutputCheck | None:
    """Read `reference=`, `check=` and `tolerance=`; None if nothing is to be checked, as with `triton.autotune`.

    >>> output_check(None, None, None) is None
    True
    >>> output_check(None, True, 1e-3).reference
    'first'
    """
    wanted = reference is not None or tolerance is not None if check is None else check
    compare = comparison(wanted, tolerance)
    if compare is None:
        if reference is not None:
            raise DefinitionError("reference= is for checks, and check=False; leave one of them out")
        return None
    known = reference is None or isinstance(reference, triton.Config) or callable(reference)
    if not known and not (isinstance(reference, str) and reference == _FIRST):
        raise DefinitionError(
            f"reference={reference!r}: write 'first', a triton.Config, or a function of the kernel's arguments"
        )
    model = fingerprint(LaunchConfig(reference)) if isinstance(reference, triton.Config) else reference
    return OutputCheck(reference or _FIRST, compare, (model or _FIRST, wanted, repr(tolerance)))


class LaunchCheck:
    """Checks the candidates of one launch, whose tensors `saved` puts back between runs.

    `make_run(after, candidate)` returns a function that runs a candidate and calls `after` while its outputs exist.
    """

    def __init__(
        self,
        check: OutputCheck,
        launch: Launch,
        saved: SavedTensors,
        make_run: Callable[[Callable[[], object], LaunchConfig], Callable[[], object]],
        candidates: Sequence[LaunchConfig],
        free_bytes: float,
    ) -> None:
        tensors = saved.tensors
        self._tensors, self._saved, self._make_run = tensors, saved, make_run
        own = check.compare
        self._compare: Compare = own.on(tuple(tensors.values())) if isinstance(own, Comparison) else own
        if sum(x.numel() * x.element_size() for x in tensors.values()) > _PART_OF_FREE * free_bytes:
            self._tensors = {name: x for name, x in tensors.items() if name in saved.declared}
            warn_once(
                "check memory",
                ",".join(self._tensors),
                "check=: too little memory is free to keep all tensors of a Triton launch. Only the tensors in "
                f"reset_to_zero and restore_value are checked: {', '.join(self._tensors) or 'none'}.",
            )
        self._expected: Any = None
        self._learn(check.reference, launch, candidates)

    def __call__(self) -> Mismatch | None:
        """Return how the tensors that a candidate has just written differ from the reference's."""
        have: Any = self._tensors
        if not isinstance(self._expected, dict):
            written = [name for name in self._saved.written() if name in self._tensors]
            wanted = self._expected if isinstance(self._expected, (tuple, list)) else (self._expected,)
            if len(written) != len(wanted):
                names = ", ".join(written) or "nothing"
                return Mismatch(
                    "wrong-result",
                    f"the reference returned {len(wanted)} outputs, and the kernel wrote {names}; return a dict of "
                    "expected tensors by argument name",
                )
            expected = dict(zip(written, wanted, strict=True))
        else:
            expected = self._expected
        have = {name: self._tensors[name] for name in expected if name in self._tensors}
        wrong = as_mismatch(self._compare(have, {name: expected[name] for name in have}))
        if wrong is not None:
            self._saved.written()  # a wrong candidate may have written to its inputs, which the next one needs
        return wrong

    def _learn(self, reference: Reference, launch: Launch, candidates: Sequence[LaunchConfig]) -> None:
        if callable(reference):
            self._ask(reference, launch)
            return
        own = [LaunchConfig(reference)] if isinstance(reference, triton.Config) else candidates
        errors: list[Exception] = []
        for candidate in own:  # the first that runs
            with Attempt() as attempt:
                self._make_run(self._keep, candidate)()
            if attempt.trial.error is None:
                return
            errors.append(attempt.trial.error)
        raise TuningFailed("the reference failed", errors)

    def _keep(self) -> None:
        self._expected = {name: tensor.clone() for name, tensor in self._tensors.items()}

    def _ask(self, reference: Callable[..., Any], launch: Launch) -> None:
        self._saved.restore()
        with Attempt() as attempt:
            self._expected = reference(*launch.args, **launch.kwargs)
        # Not by `notice`, which is for the first run of the kernel: it shows which tensors are put back between runs.
        self._saved.written()
        self._saved.restore()
        if attempt.trial.error is not None:
            raise TuningFailed("the reference failed", [attempt.trial.error])
        if isinstance(self._expected, Mapping):
            self._expected = dict(self._expected)
            for name in self._expected:
                if name not in self._tensors:
                    error = DefinitionError(f"{name!r} is not a tensor of this launch: {', '.join(self._tensors)}")
                    raise TuningFailed("the reference returned an unknown output", [error])
