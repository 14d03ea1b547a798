"""Buckets for Triton kernels: which sizes share an entry, and the launch that a bucket is tuned with.

A bucket is tuned at its representative size, so that its choice does not depend on the launch that comes first. The
tensors of that size are made up from the caller's: a dimension that equals the argument grows with it, and the contents
are repeated. Where the argument's role is ambiguous, the bucket is tuned at the caller's size.
"""

from __future__ import annotations

import math
import types
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tunebook._base.errors import DefinitionError, with_article
from tunebook._keys.buckets import Buckets, as_buckets, exact
from tunebook.adapters._triton.candidate import Launch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

    from tunebook._tuning.job import Job
    from tunebook.adapters._triton.candidate import LaunchConfig

# Made-up tensors may take this part of free memory; with less, a bucket is tuned at the caller's size.
_PART_OF_FREE: Final = 0.25
_MUCH: Final = 1024
_AT: Final = "/at:"  # in a mode, before the sizes that were measured
_SCALARS: Final = (bool, int, float, str, type(None))


def kernel_buckets(given: Mapping[str, object] | None, key: Sequence[str]) -> Buckets:
    """Read `bucket=` of a kernel, whose key holds numbers; `DefinitionError` for an argument outside of the key.

    >>> kernel_buckets({"M": [16, 64]}, ["M", "N"]).scalar("M", 17)
    64
    """
    buckets = as_buckets(given, key)
    for name in buckets.by_dimension:
        raise DefinitionError(
            f"bucket= of {name!r} names dimensions, but the key of a Triton kernel holds numbers; write one bucket, "
            f"as in bucket={{{name!r}: tunebook.pow2}}"
        )
    return Buckets({name: bucket for name, bucket in buckets.whole.items() if bucket is not exact})


def fact_readers(buckets: Buckets) -> dict[str, Callable[[Any], Hashable]]:
    """Return for each argument with a bucket the function that launches are looked up by."""
    return {name: partial(_bucket_of, buckets, name) for name in buckets.whole}


def _bucket_of(buckets: Buckets, name: str, value: Any) -> Any:
    return buckets.scalar(name, value) if type(value) is int else value


class TunedAt(NamedTuple):
    """The launch that a bucket is tuned with; `reason` says why it is the caller's own, if it could not be made."""

    launch: Launch
    sizes: Mapping[str, int]
    reason: str = ""

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in sorted(self.sizes.items()))


class _Ambiguous(Exception):  # noqa: N818 - it is not an error: the caller's tensors are used instead
    """The launch of another size cannot be made up."""


def sizes_of(launch: Launch, names: Sequence[str], buckets: Buckets) -> tuple[dict[str, int], dict[str, int]]:
    """Return the arguments of a launch that have a bucket, and the representatives of their buckets."""
    arguments = launch.positional(names) | launch.kwargs
    own = {name: arguments[name] for name in buckets.whole if type(arguments.get(name)) is int}
    return own, {name: buckets.scalar(name, size) or size for name, size in own.items()}


def with_values(launch: Launch, names: Sequence[str], values: Mapping[str, Any]) -> Launch:
    """Return a launch with other values for some arguments."""
    args = tuple(values.get(name, value) for name, value in zip(names, launch.args, strict=False))
    return Launch(launch.grid, args, {name: values.get(name, value) for name, value in launch.kwargs.items()})


def tuned_at(
    launch: Launch,
    names: Sequence[str],
    buckets: Buckets,
    grid_of: Callable[[Launch], tuple[int, ...]],
    free_bytes: float,
) -> TunedAt:
    """Return the launch to tune a bucket with: of the representative size, or else the caller's own."""
    own, wanted = sizes_of(launch, names, buckets)
    if own == wanted:
        return TunedAt(launch, own)
    try:
        return TunedAt(_resized(launch, names, own, wanted, grid_of, free_bytes), wanted)
    except _Ambiguous as error:
        return TunedAt(launch, own, str(error))


@contextmanager
def standing_in(
    job: Job[LaunchConfig],
    names: Sequence[str],
    buckets: Buckets,
    grid_of: Callable[[Launch], tuple[int, ...]],
    free_bytes: Callable[[], float],
    *,
    resize: bool = True,
) -> Iterator[Job[LaunchConfig]]:
    """Let launches of the representative sizes stand in for the launches of a job inside the block.

    The sizes become a part of the measurement policy: times at different sizes never compare. Without `resize`, the
    launches stand for themselves.
    """
    launches: list[Launch] = [part.args[0] for part in job.parts]
    if not buckets.whole or _AT in job.conditions.mode:
        yield job
        return
    measured = [
        tuned_at(launch, names, buckets, grid_of, free_bytes())
        if resize
        else TunedAt(launch, sizes_of(launch, names, buckets)[0], "representative=False")
        for launch in launches
    ]
    for launch, at in zip(launches, measured, strict=True):
        launch.stand_in = None if at.launch is launch else at.launch
    mode = f"{job.conditions.mode}{_AT}{';'.join(map(str, measured))}"
    try:
        yield job._replace(conditions=job.conditions._replace(mode=mode))
    finally:
        for launch in launches:
            launch.stand_in = None


def _resized(
    launch: Launch,
    names: Sequence[str],
    own: Mapping[str, int],
    wanted: Mapping[str, int],
    grid_of: Callable[[Launch], tuple[int, ...]],
    free_bytes: float,
) -> Launch:
    arguments = launch.positional(names) | launch.kwargs
    grown = _by_size(own, wanted)
    tensors: dict[str, Any] = {}
    for name, value in arguments.items():
        if getattr(value, "untyped_storage", None) is not None:
            tensors[name] = value
        elif not isinstance(value, _SCALARS) and name in names:
            raise _Ambiguous(f"{name} is {with_article(type(value).__name__)}")
        elif name not in own and type(value) is int and value in grown:
            raise _Ambiguous(f"{name} has the same value")
    forms = {name: _form(tensor, grown) for name, tensor in tensors.items()}
    if not any(form.follows for form in forms.values()):
        raise _Ambiguous("the size of no tensor follows it")
    values: dict[str, Any] = {**_strides(arguments, own, tensors, forms), **wanted}
    # A tensor whose size follows the argument in another way, as one number per block, gets room for that.
    room = math.prod(max(1, math.ceil(new / old)) for old, new in grown.items())
    spans = {name: form.span * (1 if form.follows else room) for name, form in forms.items()}
    if sum(spans[name] * tensors[name].element_size() for name in spans) > _PART_OF_FREE * free_bytes:
        raise _Ambiguous("too little memory is free")
    made = _made_up(tensors, forms, spans)
    made_of = {id(tensors[name]): tensor for name, tensor in made.items()}
    resized = with_values(launch, names, {**values, **made})
    resized.grid = _grid_at(launch.grid, grown, made_of)
    if grid_of(resized) == grid_of(launch):
        # Perhaps both sizes need as many blocks: a grid that follows the size differs for a much larger one.
        larger = with_values(launch, names, {name: _MUCH * size for name, size in own.items()})
        larger.grid = _grid_at(launch.grid, {old: _MUCH * old for old in grown}, {})
        if grid_of(larger) == grid_of(launch):
            raise _Ambiguous("the grid does not follow it")
    return resized


def _by_size(own: Mapping[str, int], wanted: Mapping[str, int]) -> dict[int, int]:
    """Return the new size for each old size; sizes that stay are not in it."""
    grown: dict[int, int] = {}
    for name, size in own.items():
        if grown.setdefault(size, wanted[name]) != wanted[name]:
            raise _Ambiguous(f"another argument has the same value as {name}")
    if any(old < 2 or new < 1 for old, new in grown.items() if old != new):
        raise _Ambiguous("a size of 1 or less is like many others")
    return {old: new for old, new in grown.items() if old != new}


class _Form(NamedTuple):
    """The shape and the strides of a tensor to make; `span` is the number of elements from its first to its last."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    follows: bool

    @property
    def span(self) -> int:
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))


def _form(tensor: Any, grown: Mapping[int, int]) -> _Form:
    shape, old = tuple(tensor.shape), tuple(tensor.stride())
    new = tuple(grown.get(size, size) for size in shape)
    if new == shape:
        if tensor.numel() in grown and tensor.is_contiguous():  # "n" is the number of all elements
            return _Form((grown[tensor.numel()],), (1,), follows=True)
        return _Form(shape, old, follows=False)
    strides = list(old)
    before = after = 1  # the elements of all inner dimensions
    for at in sorted(range(len(shape)), key=lambda at: (old[at], shape[at])):
        if old[at] == before:
            strides[at] = after
        elif before != after and shape[at] > 1:
            raise _Ambiguous("a tensor is not contiguous")
        before, after = max(before, old[at] * shape[at]), max(after, strides[at] * new[at])
    return _Form(new, tuple(strides), follows=True)


def _strides(
    arguments: Mapping[str, Any], own: Mapping[str, int], tensors: Mapping[str, Any], forms: Mapping[str, _Form]
) -> dict[str, int]:
    """Return new values for the arguments that are strides of tensors, found by their values."""
    becomes: dict[int, set[int]] = {}
    for name, form in forms.items():
        for old, new in zip(tensors[name].stride(), form.strides, strict=False):
            becomes.setdefault(old, set()).add(new)
    changed: dict[str, int] = {}
    for name, value in arguments.items():
        if name in own or type(value) is not int or becomes.get(value, {value}) == {value}:
            continue
        if len(becomes[value]) > 1:
            raise _Ambiguous(f"{name} may be the stride of several tensors")
        (changed[name],) = becomes[value]
    return changed


def _made_up(tensors: Mapping[str, Any], forms: Mapping[str, _Form], spans: Mapping[str, int]) -> dict[str, Any]:
    """Return tensors of other sizes with the contents of the caller's, repeated; a tensor given twice is made once."""
    made: dict[int, Any] = {}
    for name, tensor in tensors.items():
        if id(tensor) in made:
            continue
        flat, form = tensor.detach().reshape(-1), forms[name]
        if flat.numel():
            repeated = flat.repeat(math.ceil(spans[name] / flat.numel()))
            made[id(tensor)] = repeated.as_strided(form.shape, form.strides)
        else:
            made[id(tensor)] = tensor
    return {name: made[id(tensor)] for name, tensor in tensors.items()}


def _grid_at(grid: Any, grown: Mapping[int, int], made_of: Mapping[int, Any]) -> Any:
    """Return a grid function that sees the new sizes and tensors in the variables it was defined with."""
    if not isinstance(grid, types.FunctionType):
        return grid

    def swap(value: Any) -> Any:
        return grown.get(value, value) if type(value) is int else made_of.get(id(value), value)

    cells = []
    for cell in grid.__closure__ or ():
        try:
            cells.append(types.CellType(swap(cell.cell_contents)))
        except ValueError:  # a variable without a value
            cells.append(cell)
    defaults = grid.__defaults__ and tuple(map(swap, grid.__defaults__))
    copy = types.FunctionType(grid.__code__, grid.__globals__, grid.__name__, defaults, tuple(cells) or None)
    copy.__kwdefaults__ = grid.__kwdefaults__ and {name: swap(x) for name, x in grid.__kwdefaults__.items()}
    return copy
