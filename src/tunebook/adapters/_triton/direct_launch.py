"""Launches programs that Triton has compiled, without asking Triton which program a launch needs.

To find the program, Triton describes every argument of every launch and writes all options as text: 8.3 of the 8.7 us
of a launch with five arguments, besides the driver's own work. But the program depends on few facts: the classes,
dtypes and alignments of the arguments, and, of an integer, whether it is 1, a multiple of 16, and how long it is. So
the first launch of each kind goes through Triton, whose program is noted under these facts, and a function that is
generated for the classes of the arguments finds it from then on.

All other launches go through Triton as before: with hooks, with a replaced `JITFunction.run`, with a program that
Triton has dropped, with a global variable that has another value, with arguments of other classes, on other GPUs than
NVIDIA's, and under versions of Triton whose launch does anything that is not written here.
"""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any, Final, cast, final

import triton
import triton.language as tl
from triton import knobs
from triton.runtime import JITFunction, driver

from tunebook._memo.answer_memo import BoundedDict

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from tunebook.adapters._triton.candidate import LaunchConfig

# The versions whose description of arguments was read; and all names that their `JITFunction.run` reads. In a later
# version with one more name, for example of a setting, all launches go through Triton.
_VERSIONS: Final = ("3.6.", "3.7.", "3.8.", "3.9.")
_READ: Final = frozenset(
    [
        "_do_compile",
        "_pack_args",
        "active",
        "add_stages_inspection_hook",
        "append",
        "callable",
        "compilation",
        "compute_cache_key",
        "debug",
        "device_caches",
        "driver",
        "fpsan_homomorphic_casts",
        "function",
        "get",
        "get_current_device",
        "get_current_stream",
        "hasattr",
        "instrumentation_mode",
        "items",
        "knobs",
        "launch_enter_hook",
        "launch_exit_hook",
        "launch_metadata",
        "len",
        "object",
        "packed_metadata",
        "pre_run_hooks",
        "result",
        "run",
        "runtime",
        "used_global_vals",
        "values",
        "RuntimeError",
    ]
)
_RUN: Final = JITFunction.run
# A profiler may have replaced it before this module was imported: by any object, or by a function of its own.
_IS_TRITONS: Final = getattr(_RUN, "__globals__", None) is vars(sys.modules[JITFunction.__module__])
_NAMES: Final = frozenset(_RUN.__code__.co_names if _IS_TRITONS else ())
_IS_KNOWN: Final = _IS_TRITONS and triton.__version__.startswith(_VERSIONS) and _NAMES <= _READ
# Settings that a program depends on, as far as this version has them.
_SETTINGS: Final = [
    f"_knobs.{group}.{name}"
    for group, name in (
        ("runtime", "debug"),
        ("compilation", "instrumentation_mode"),
        ("compilation", "fpsan_homomorphic_casts"),
    )
    if name in _NAMES
]
_MOST_FORMS: Final = 256  # each takes 0.3 ms to generate
_MOST_PROGRAMS: Final = 4096  # of a form
_CONSTANTS: Final = frozenset({int, bool, float, str, type(None), tl.dtype})  # a program depends on their values
_TENSOR: Final = "{0}.dtype, {0}.data_ptr() % 16 == 0, "
# As the compiler sees them: 1 is a constant, and the others have 32 bits, 64 bits, 64 bits without a sign, or too many,
# which Triton raises for.
_INTEGER: Final = "{0} == 1, {0} % 16 == 0, -0x80000000 <= {0} <= 0x7fffffff or ({0} >> 63,), "
_OTHERS: Final[Mapping[type, str]] = {int: _INTEGER, bool: "", float: "", type(None): ""}
_MISSING: Final = object()
_HookChain: Final = getattr(knobs, "HookChain", None)  # not in every version that this module is imported under


def is_watched(function: Any) -> bool:
    """Return whether a hook is told of launches, or the function that launches was replaced."""
    runtime = knobs.runtime
    entered, left = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(
        function.pre_run_hooks
        # An empty chain of Triton's calls nothing. Any other object is a hook, whatever its attributes and its truth.
        or (entered.calls if type(entered) is _HookChain else entered is not None)
        or (left.calls if type(left) is _HookChain else left is not None)
        or getattr(function.run, "__func__", None) is not _RUN
        or ("add_stages_inspection_hook" in _NAMES and runtime.add_stages_inspection_hook is not None)
    )


def found_by_triton(function: Any, device: Hashable, key: str) -> Any:
    """Return the program that Triton has under its key; None if it would compile, raise an error, or tell a hook."""
    caches = function.device_caches.get(device)
    if caches is None or is_watched(function):
        return None
    for (name, _), (value, scope) in function.used_global_vals.items():
        if scope.get(name, _MISSING) != value:  # which Triton raises for
            return None
    return caches[0].get(key)


@final
class DirectLaunches:
    """The launches of one kernel. `function` is a `JITFunction`; those of anything else go through its `run`."""

    def __init__(self, function: Any) -> None:
        self._function: Final = function
        self._is_known: Final = _IS_KNOWN and type(function) is JITFunction and _is_simple(function)
        # Generated functions, by the names and classes of the arguments.
        self._forms: Final[BoundedDict[tuple[Hashable, ...], Any]] = BoundedDict(_MOST_FORMS)

    def run(self, config: LaunchConfig, grid: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Launch with a configuration, and return the compiled program, as Triton's `run` does."""
        if not self._is_known:
            return self._through_triton(config, grid, args, kwargs)
        form = (config.names, *map(type, args))
        if kwargs:
            form = (*form, *kwargs, *map(type, kwargs.values()))
        launch = self._forms.get(form)
        if launch is None:
            launch = self._forms[form] = self._generate(config, args, kwargs) or self._through_triton
        return launch(config, grid, args, kwargs)

    def _through_triton(self, config: LaunchConfig, grid: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self._function.run(*args, grid=grid, warmup=False, **kwargs, **config.meta)

    def _learn(
        self,
        keys: BoundedDict[tuple[Hashable, ...], str],
        facts: tuple[Hashable, ...],
        config: LaunchConfig,
        grid: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Launch through Triton, and note the program that it has found."""
        function, device = self._function, facts[1]
        kernel = self._through_triton(config, grid, args, kwargs)
        caches = function.device_caches.get(device)
        if caches is None or is_watched(function):
            return kernel
        # From a copy, because another thread may compile meanwhile.
        key = next((key for key, value in dict(caches[0]).items() if value is kernel), "")
        is_plain = all(type(config.meta[name]) in _CONSTANTS for name in function.arg_names if name in config.meta)
        keys[facts] = key if is_plain and caches[2].backend == "cuda" else ""
        return kernel

    def _generate(
        self, config: LaunchConfig, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Callable[..., Any] | None:
        """Return the function for launches with arguments of these classes; None if only Triton can launch them."""
        function = self._function
        given = dict(zip(function.arg_names, args, strict=False)) | dict(kwargs)
        if len(given) < len(args) + len(kwargs) or not given.keys() <= set(function.arg_names) - set(config.names):
            return None  # which Triton raises for, or options of Triton's among the arguments
        variables = {name: f"a{at}" for at, name in enumerate(given)}
        facts, values, namespace = [], {}, {}
        for at, parameter in enumerate(function.params):
            name = parameter.name
            if name in given:
                values[name] = variables[name]
                fact = _fact_of(type(given[name]), parameter)
                if fact is None:
                    return None
                facts.append(fact.format(variables[name]))
            elif name in config.names:
                values[name] = f"meta[{name!r}]"
            # A default of another class may change: a function of Triton's, whose code is compiled in.
            elif parameter.has_default and type(parameter.default) in _CONSTANTS:
                values[name], namespace[f"default{at}"] = f"default{at}", parameter.default
            else:
                return None
        namespace |= {
            "_driver": driver,
            "_knobs": knobs,
            "_function": function,
            # Triton's keys of programs, by facts; empty for a launch that only Triton can make. Each form has its own,
            # because facts contain neither the classes of arguments nor defaults.
            "_keys": BoundedDict(_MOST_PROGRAMS),
            "_found": found_by_triton,
            "_learn": self._learn,
            "_through_triton": self._through_triton,
        }
        every = list(variables.values())
        source = _source(every[: len(args)], every[len(args) :], facts, values)
        exec(compile(source, "<tunebook direct launch>", "exec"), namespace)  # noqa: S102 - as dataclasses do
        return cast("Callable[..., Any]", namespace["launch"])


def _source(positional: Sequence[str], named: Sequence[str], facts: Sequence[str], values: Mapping[str, str]) -> str:
    """Return the code of a launch, from the code for its facts and for the value of each parameter."""
    return "\n".join(
        [
            "def launch(config, grid, args, kwargs):",
            f" {''.join(f'{each}, ' for each in positional)} = args" if positional else "",
            f" {''.join(f'{each}, ' for each in named)} = kwargs.values()" if named else "",
            " active = _driver.active",
            " device = active.get_current_device()",
            f" facts = config, device, _function.debug, {''.join(f'{each}, ' for each in _SETTINGS)}{''.join(facts)}",
            " key = _keys.get(facts)",
            " if key == '':",
            "  return _through_triton(config, grid, args, kwargs)",
            " kernel = key and _found(_function, device, key)",
            " if kernel is None:",
            "  return _learn(_keys, facts, config, grid, args, kwargs)",
            " meta = config.meta",
            # Before the grid, which may change it for other launches.
            " stream = active.get_current_stream(device)",
            " if callable(grid):",
            f"  named = {{{', '.join(f'{name!r}: {value}' for name, value in values.items())}}}",
            "  grid = grid(named)",
            # With the values that the grid has written to its argument.
            *_launching("*named.values()"),
            " else:",
            *_launching(", ".join(values.values())),
            " return kernel",
        ]
    )


def _launching(values: str) -> list[str]:
    return [
        "  size = len(grid)",
        "  kernel.run(grid[0], grid[1] if size > 1 else 1, grid[2] if size > 2 else 1,",
        f"   stream, kernel.function, kernel.packed_metadata, None, None, None, {values})",
    ]


def _is_simple(function: Any) -> bool:
    parameters = inspect.signature(function.fn).parameters.values()
    return all(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)


def _fact_of(kind: type, parameter: Any) -> str | None:
    """Return the code for the facts of an argument that a program depends on; None for a class that is not known."""
    if parameter.is_constexpr:
        return "{0}, " if kind in _CONSTANTS else None
    torch = sys.modules.get("torch")
    if torch is not None and kind in (torch.Tensor, torch.nn.Parameter):
        return _TENSOR
    return _OTHERS.get(kind)
