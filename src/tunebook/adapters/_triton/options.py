"""The options of `autotune` that `triton.autotune` does not take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

from tunebook._base.errors import DefinitionError, did_you_mean
from tunebook._kernel.measure import check_measure
from tunebook.adapters._triton.buckets import kernel_buckets
from tunebook.adapters._triton.check import output_check
from tunebook.adapters._triton.engine import More

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tunebook._base.vocabulary import StrategyLike
    from tunebook._kernel.measure import Measure
    from tunebook._kernel.output_check import Compare, Tolerance
    from tunebook._kernel.policy import AutotunePolicy
    from tunebook.adapters._triton.check import Reference
    from tunebook.adapters._triton.engine import Store
    from tunebook.adapters._triton.heuristic import Heuristic


class AutotuneOptions(TypedDict, total=False):
    """The keyword arguments of `autotune`; its docstring describes each of them."""

    store: Store
    policy: AutotunePolicy | None
    heuristic: Heuristic | None
    version: str
    processes: bool
    devices: Sequence[int] | Literal["all"]
    worker_setup: str
    thorough: bool
    bucket: Mapping[str, object] | None
    representative: bool
    reference: Reference | None
    check: bool | str | Compare | None
    tolerance: Tolerance | None
    search: StrategyLike
    measure: Measure | None
    on_event: Callable[..., None] | None


_CHECKS = ("reference", "check", "tolerance")


def read_options(options: Mapping[str, Any], key: Sequence[str] | None) -> More:
    """Return the options as the engine takes them; a mistake is a `DefinitionError` here, not at the first launch."""
    if not options:
        return More()
    for name in options:
        if name not in AutotuneOptions.__annotations__:
            raise DefinitionError(f"autotune(): {did_you_mean('option', name, list(AutotuneOptions.__annotations__))}")
    measure = check_measure(options.get("measure"))
    if measure is not None and (measure.host is not None or measure.inputs is not None):
        raise DefinitionError(
            f"autotune(measure={measure!r}): launches are timed by the device's clock, on their own tensors; leave "
            "host= and inputs= out"
        )
    if options.get("bucket") is not None:
        kernel_buckets(options["bucket"], key or ())
    if options.get("search", "auto") != "auto":
        from tunebook.search import check_strategy  # noqa: PLC0415 - loaded late: 20 ms

        check_strategy(options["search"])
    checked = None
    if any(options.get(name) is not None for name in _CHECKS):
        checked = output_check(*(options.get(name) for name in _CHECKS))
    return More(output_check=checked, **{name: value for name, value in options.items() if name not in _CHECKS})
