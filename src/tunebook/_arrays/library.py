"""One record per array library: how its arrays are described, copied, compared, restored, keyed, timed and made up.

Every other module asks the record of an array's library, so a new library is one file that calls
`register_array_library`. Arrays of a library without a record are described by their usual attributes (`shape`,
`dtype`, `strides`, `device`), and are neither copied nor restored. The shipped adapters register themselves when the
first array of their library appears; `import tunebook` imports none of them.
"""

from __future__ import annotations

import importlib
import operator
import sys
from dataclasses import dataclass, field
from itertools import accumulate
from numbers import Integral
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

from tunebook._base.errors import DefinitionError, UnkeyableError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from tunebook._arrays.device_properties import DeviceProperties

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """The facts about an array that are part of a call key. It has `.shape` and `.dtype`, and the live array's key.

    `values` are the values of a small array of integers, as text, to make up arrays from; they are not in the key.
    """

    __module__ = "tunebook"  # its name in recordings, which must outlive the move of a file

    library: str
    dtype: str
    shape: tuple[int, ...]
    layout: str = "C"
    platform: str = ""
    grad: bool = False  # whether torch computes its gradient: a call then keeps more memory than its result
    values: str = field(default="", repr=False, compare=False)
    variant: str = ""  # of arrays that behave unlike the library's ordinary arrays: a subclass, a weak type

    @property
    def family(self) -> str:
        """The library, and the variant if there is one: "numpy:numpy.ma.MaskedArray"."""
        return f"{self.library}:{self.variant}" if self.variant else self.library


# ------------------------------------------------------------------------------- how arrays usually look: the defaults


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype of any library, without the library's name.

    >>> import numpy as np
    >>> dtype_name(np.dtype("float32")), dtype_name(np.dtype(">f4")), dtype_name("torch.float32")
    ('float32', '>f4', 'float32')
    """
    if getattr(dtype, "names", None) is not None or getattr(dtype, "subdtype", None) is not None:
        return str(dtype)  # numpy calls every record of 8 bytes "void64", whatever its fields are
    if getattr(dtype, "isnative", True) is False:
        return str(dtype.str)  # numpy calls both byte orders "float32"
    name = getattr(dtype, "name", None)
    return name if isinstance(name, str) else str(dtype).rpartition(".")[2]


def concrete_shape(x: Any) -> tuple[int, ...]:
    """Return the shape as integers; `UnkeyableError` if a dimension is a symbol."""
    for dimension in x.shape:
        # Not `operator.index`: torch's SymInt would answer it, and specialise the program that is being traced.
        if not isinstance(dimension, Integral):
            raise UnkeyableError(
                f"the shape ({', '.join(map(str, x.shape))}) has a dimension that is not a number. Symbolic shapes "
                "cannot be tuned: pass a configuration with the call, or let the heuristic answer"
            )
    return tuple(int(dimension) for dimension in x.shape)


def strided_layout(x: Any, shape: tuple[int, ...]) -> str:
    """Return the layout class of an array with `strides` in bytes, or with `stride()` in elements; "C" without."""
    strides = getattr(x, "strides", None)
    if isinstance(strides, tuple):
        return layout_class(shape, strides, x.dtype.itemsize)
    stride = getattr(x, "stride", None)
    return layout_class(shape, tuple(stride()), 1) if callable(stride) else "C"


def layout_class(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> str:
    """Return the class of a memory layout: the part of the strides that decides a kernel's speed.

    "C" and "F" are dense. "P021" is dense too, its dimensions listed from the outermost to the innermost. All other
    layouts start with "S": `-` stands before a dimension that runs backwards, `*` before a broadcast dimension, and a
    `g` at the end means gaps between neighbours in the innermost dimension. Dimensions of size 1 have no layout and are
    left out.

    >>> layout_class((4, 8), (32, 4), 4), layout_class((4, 8), (4, 16), 4), layout_class((4, 8), (64, 8), 4)
    ('C', 'F', 'S01g')
    """
    real = [i for i, n in enumerate(shape) if n > 1]
    if 0 in shape or not real:
        return "C"
    order = sorted(real, key=lambda i: (-abs(strides[i]), i))
    dense = accumulate((shape[i] for i in reversed(order)), operator.mul, initial=itemsize)
    if all(strides[i] == expected for i, expected in zip(reversed(order), dense, strict=False)):
        if order == real:
            return "C"
        return "F" if order == real[::-1] else "P" + _join(map(str, order), len(shape))
    marks = {i: "*" if strides[i] == 0 else "-" if strides[i] < 0 else "" for i in order}
    smallest = min((abs(strides[i]) for i in order if strides[i]), default=itemsize)
    return "S" + _join((f"{marks[i]}{i}" for i in order), len(shape)) + ("g" if smallest > itemsize else "")


def _join(dimensions: Iterable[str], rank: int) -> str:
    return ("" if rank <= 10 else ".").join(dimensions)  # "P0.10.1": beyond ten dimensions they have two digits


def _put_back_immutable(x: Any, _copy: Any) -> None:
    raise DefinitionError(f"a {type(x).__qualname__} has no put_back in the record of its array library")


# ----------------------------------------------------------------------------------------------- parts of the record


class Timer(Protocol):
    """Times runs by the clock of a device, on which they may end after the call that started them."""

    @property
    def name(self) -> str:
        """Its name in the measurement policy: times by different clocks are never compared."""

    @property
    def is_device_clock(self) -> bool:
        """Whether the device's own clock takes the times, which repeats better than the host's."""

    def sample_s(self, launch: Callable[[], object], runs: int) -> float:
        """Return the seconds per run, as the mean of several that are timed together."""

    def wait(self, result: Any) -> None:
        """Block until everything that was started is done."""


class ArgumentReader(NamedTuple):
    """How generated code reads one argument, as expressions over `{0}`; `{1}` is the class it had when generated.

    `guard` must hold for `fast` to tell calls apart; `exact` tells them apart by itself. `settings` is read once per
    call and ends in a comma. A value for which `refused` holds has no fast key. With `traced`, a compiler of the
    library may be reading the code instead of running it.
    """

    guard: str
    fast: str
    exact: str = "_tb_leaf({0})"
    settings: str = ""
    refused: str = ""
    traced: bool = False


class TuningSite(NamedTuple):
    """A call on arrays that exist, in the place where its candidates are to run.

    `inv` is the call as the kernel sees it. Candidates are called with `args` and `kwargs`, which are larger where the
    call is batched. `bind(kernel, inv, config)` returns a function that runs the call. `programs(bind, backward)`
    takes a function from configurations to runnable functions; it returns a function from configurations to the
    functions that are measured, and one that compiles them ahead, or None if the kernel compiles.
    `differentiable(bind, config)` says whether a backward pass can be measured, as one configuration shows, and
    `passes` names the passes that are then measured. `rotating(n)` returns the site with n copies of the arrays that
    take turns; None where the candidates are called with the copies. `one_of(output)` returns the part of an output
    that `inv` would give. `with_inputs(args, kwargs)` returns the site with other arguments for the call; None where
    its arguments are the user's own.
    """

    inv: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    bind: Callable[[Any, Any, Any], Callable[..., Any]]
    programs: Callable[
        [Callable[[Any], Callable[..., Any]], bool], tuple[Callable[[Any], Any], Callable[[Any], Any] | None]
    ]
    differentiable: Callable[[Callable[[Any], Callable[..., Any]], Any], bool]
    passes: str = "forward+backward"
    one_of: Callable[[Any], Any] = lambda output: output
    with_inputs: Callable[[tuple[Any, ...], Mapping[str, Any]], Any] | None = None
    rotating: Callable[[int], Any] | None = None


class CapturedCall(Protocol):
    """A call, kept without its arrays' data where that does not exist yet; may be tuned later and by any thread."""

    def site(self) -> AbstractContextManager[tuple[TuningSite, Callable[..., Any]]]:
        """Give the place where candidates may run, and `there(function, *args)`, which calls a function in it.

        The place may be another thread; the caller's settings are in force in it.
        """


class Framework(Protocol):
    """Facts about a call that its arguments do not hold: settings of a thread, batching by a vmap, a mesh.

    They decide which program runs, so they are part of the call's key, and are set up again where the call is tuned.
    The methods get arguments among which are arrays of the library.
    """

    def surroundings(self, arguments: object) -> Mapping[str, Any]:
        """Return the settings that a call depends on, for its key; empty for an ordinary call."""

    def obstacle(self, arguments: object) -> str | None:
        """Return the reason why a call with these arguments cannot be tuned, or None."""

    def is_traced(self, arguments: object) -> bool:
        """Return whether some of the arrays are placeholders of a trace, without values."""

    def capture(self, inv: Any) -> CapturedCall:
        """Return a call so that it can be tuned, with the settings of this thread."""

    def bind(self, kernel: Any, inv: Any, cfg: Any) -> Callable[..., Any]:
        """Return a function that runs a call with a configuration, given its arguments, in the user's program."""

    def jitted(self, function: Callable[..., T]) -> Callable[..., T]:
        """Return a function compiled as a whole."""

    def labelled(self, function: Callable[..., T], label: str) -> Callable[..., T]:
        """Return a function whose operations carry a label, for profilers."""


def class_name(x: Any, ordinary: tuple[type | None, ...]) -> str:
    """Return the name of an array's class; "" if the class is ordinary."""
    kind = type(x)
    return "" if kind in ordinary else f"{kind.__module__}.{kind.__qualname__}"


class ArrayLibrary(NamedTuple):
    """All that tunebook needs to know about the arrays of a library. Only `name` is required.

    `name` is the root module of the arrays' classes. `classes` lists classes of arrays without the attributes `shape`
    and `dtype`, or from another module.

    **Describing.** `shape(x)`, `dtype(x)`, `layout(x, shape)` and `device(x)` read an array; the defaults read the
    usual attributes. `platform(device)`, `hardware(device)` and `driver(device)` name a device object of the library:
    its kind ("gpu"), its model, and the version of its software; `properties(device)` returns its `DeviceProperties` as
    far as the driver knows them, or None. `accelerator()` returns the process's accelerator,
    or None: a table gets no arrays to ask. `variant(x)` names the class of an array that behaves unlike the library's
    ordinary arrays, as a masked array does, or another property that gives it other programs.

    **Copying and restoring.** The defaults are for arrays that cannot be written to. A library of mutable arrays gives
    all of: `is_writable(x)`, `copy(x)` (shares no memory with the array, and may be on another device),
    `is_same(x, copy)` (equal to the byte) and `put_back(x, copy)`. `is_restorable(x)` is False for an array that a
    failed run may leave changed.

    **Comparing.** `to_numpy(x)` returns an array that numpy can read. `is_close(x, y, tolerance)` may answer True
    without moving the arrays to the host; False means not sure.

    **Keys.** `fast_key(x)` returns a hashable value, equal for two arrays only if they have the same call key; without
    it, a call takes 10 us longer. `reader(kind, layout)` and `hot_names` let generated code read arrays of a class by
    an expression. `packed()` returns the classes and attributes that the C accelerator reads. `dtype_text(value)`
    returns the key of a dtype object of the library.

    **Measuring.** `timer(arguments)` returns a `Timer`, or None for the host's clock. For a user who chooses how to
    measure, `timer_as(arguments, cold, graph)` returns a timer that empties the caches before each run or leaves them
    warm, for runs that are launched or replayed; None if there is no such timer. `graph(arguments)` returns a function
    that captures a run in a graph of the device, so that calling the result replays it; None if that cannot be.
    `duplicate(x)` returns another array with the same values in memory of its own; without it, `copy` does.

    **Making up.** `make(spec, seed)` returns an array that describes as `spec`, filled with harmless values. Small
    arrays of integers may be indices, which random values would send out of range: `values(x)` returns their values as
    an array of numpy, or None if they cannot be read now, and `with_values(x, values)` returns a made-up array with
    these values, which may be the same array. `placeholder(x, shape)` returns an array without values, as a trace has
    them, in another shape; None for an array that has values.

    **Calls.** `framework` knows the settings around a call; `compiling()` says whether a compiler is reading the
    running code; `mesh_classes()` returns the classes by which a call is spread over devices.
    """

    name: str
    classes: tuple[type, ...] = ()
    shape: Callable[[Any], tuple[Any, ...]] = concrete_shape
    dtype: Callable[[Any], str] = lambda x: dtype_name(x.dtype)
    layout: Callable[[Any, tuple[Any, ...]], str] = strided_layout
    device: Callable[[Any], object | None] = lambda x: getattr(x, "device", None)
    grad: Callable[[Any], bool] = lambda _x: False
    variant: Callable[[Any], str] = lambda _x: ""
    platform: Callable[[Any], str] = lambda _device: ""
    hardware: Callable[[Any], str | bytes | None] = lambda _device: None
    driver: Callable[[Any], Mapping[str, str] | None] = lambda _device: None
    properties: Callable[[Any], DeviceProperties | None] = lambda _device: None
    accelerator: Callable[[], object | None] = lambda: None
    is_writable: Callable[[Any], bool] = lambda _x: False
    copy: Callable[[Any], Any] = lambda x: x
    is_same: Callable[[Any, Any], bool] = lambda x, copy: x is copy
    put_back: Callable[[Any, Any], object] = _put_back_immutable
    is_restorable: Callable[[Any], bool] = lambda _x: True
    to_numpy: Callable[[Any], Any] = lambda x: x
    is_close: Callable[[Any, Any, float], bool] = lambda _x, _y, _tolerance: False
    fast_key: Callable[[Any], Hashable] | None = None
    reader: Callable[[type, bool], ArgumentReader | None] = lambda _kind, _layout: None
    hot_names: Mapping[str, object] = MappingProxyType({})
    packed: Callable[[], tuple[object, ...] | None] = lambda: None
    dtype_text: Callable[[Any], str | None] = lambda _value: None
    timer: Callable[[object], Timer | None] = lambda _arguments: None
    timer_as: Callable[[object, bool, bool], Timer | None] = lambda _arguments, _cold, _graph: None
    graph: Callable[[object], Callable[[Callable[[], object]], Callable[[], object]] | None] = lambda _arguments: None
    duplicate: Callable[[Any], Any] | None = None
    make: Callable[[ArraySpec, int], Any] | None = None
    values: Callable[[Any], Any] = lambda _x: None
    with_values: Callable[[Any, Any], Any] | None = None
    placeholder: Callable[[Any, tuple[int, ...]], Any] = lambda _x, _shape: None
    framework: Framework | None = None
    compiling: Callable[[], bool] | None = None
    mesh_classes: Callable[[], tuple[type, ...]] = tuple


# ------------------------------------------------------------------------------------------------------- the registry

_ADAPTERS: Final = {
    "cupy": "tunebook.adapters.cupy",
    "jax": "tunebook.adapters.jax",
    "numba": "tunebook.adapters.numpy",
    "numpy": "tunebook.adapters.numpy",
    "pyopencl": "tunebook.adapters.opencl",
    "torch": "tunebook.adapters.torch",
}
_known: Final[dict[str, ArrayLibrary]] = {}
_listed: Final[dict[type, ArrayLibrary]] = {}  # the `classes` of records
_by_class: Final[dict[type, ArrayLibrary]] = {}  # the classes seen so far


def register_array_library(library: ArrayLibrary) -> None:
    """Let arrays of a library be arguments and outputs of kernels. Call it before the first call with one of them.

    A second record of the same name replaces the first.
    """
    if not isinstance(library, ArrayLibrary) or not library.name:
        raise DefinitionError(
            'register_array_library takes a record with a name: register_array_library(ArrayLibrary(name="mylib", ...))'
        )
    _known[library.name] = library
    for kind in [kind for kind, known in _listed.items() if known.name == library.name]:
        del _listed[kind]
    _listed.update(dict.fromkeys(library.classes, library))
    _by_class.clear()


def root_module(kind: type) -> str:
    """Return the name of the library that a class belongs to."""
    root = kind.__module__.partition(".")[0]
    return "jax" if root == "jaxlib" else root  # an array's class lives in jaxlib, its tracer's in jax


def library_named(name: str) -> ArrayLibrary:
    """Return the record of a library, importing its adapter if there is one; an unknown library has the defaults."""
    found = _known.get(name)
    if found is None and name in _ADAPTERS:
        importlib.import_module(_ADAPTERS[name])
        found = _known[name]
    return ArrayLibrary(name, is_restorable=lambda _x: False) if found is None else found


def library_of(x: object) -> ArrayLibrary:
    """Return the record of an array's library."""
    kind = type(x)
    found = _by_class.get(kind)
    if found is None:
        found = _listed.get(kind) or library_named(_root_of_array(kind))
        if found.name in _known:
            _by_class[kind] = found
    return found


def _root_of_array(kind: type) -> str:
    """Return the library of the nearest base that is an array class of a known library; else of the class itself."""
    for base in kind.__mro__:
        root = root_module(base)
        # Both attributes: a mixin of numpy's is not an array.
        known = root in _known or root in _ADAPTERS
        if known and (base is kind or all(getattr(base, name, None) is not None for name in ("shape", "dtype"))):
            return root
    return root_module(kind)


def is_registered_class(kind: type) -> bool:
    """Return whether a record lists this very class among its arrays."""
    return kind in _listed


def loaded_libraries() -> Iterator[ArrayLibrary]:
    """Yield the records that have been registered."""
    yield from list(_known.values())


def load_adapters() -> None:
    """Import the adapters of the libraries that this process uses, before a setting changes for them."""
    for name in _ADAPTERS:
        # A package that is being imported is listed too, but lacks its last definitions.
        if name not in _known and getattr(sys.modules.get(name), "version", None) is not None:
            library_named(name)


def hot_names() -> dict[str, object]:
    """Return the names that generated code may refer to."""
    names = {name: value for library in _known.values() for name, value in library.hot_names.items()}
    compilers = [library.compiling for library in _known.values() if library.compiling is not None]
    if compilers:
        names["_tb_compiling"] = compilers[0] if len(compilers) == 1 else lambda: any(each() for each in compilers)
    return names
