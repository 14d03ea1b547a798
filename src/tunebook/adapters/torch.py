"""PyTorch: tunable functions on tensors, under autograd and torch.compile, and as custom operators.

`@tunable` functions just work on tensors: this module is imported when the first tensor is seen. A call's key contains
the strides, the device, and whether gradients are needed. Runs on a GPU are timed by its own clock, with a cold cache.
Inside `torch.compile` the choice is made while the program is traced, on real tensors, and is a constant in it.
"""

from __future__ import annotations

import inspect
import operator
import typing
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch

from tunebook._api.function_kernel import FunctionKernel
from tunebook._arrays.describe import arrays_in, describe
from tunebook._arrays.device_properties import read_torch
from tunebook._arrays.library import (
    ArgumentReader,
    ArrayLibrary,
    TuningSite,
    class_name,
    register_array_library,
    strided_layout,
)
from tunebook._arrays.made_up import refuse_variant, strides_for
from tunebook._base.errors import DefinitionError, Unsupported
from tunebook._selection.recording import abstract, concrete
from tunebook.adapters._cuda.timer import CACHE_BYTES, EventTimer, Replay

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

    from tunebook._api.tunable_types import Tunable
    from tunebook._arrays.library import ArraySpec
    from tunebook._kernel.kernel import Invocation, Kernel

__all__ = ["CudaTimer", "custom_op"]

T = TypeVar("T")

_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)


def _tensors(arguments: object) -> list[Any]:
    return [x for x in arrays_in(arguments) if isinstance(x, torch.Tensor)]


def _autocast() -> tuple[tuple[str, str], ...]:
    """Return the device types with autocast, where operators choose their dtype by themselves, and the dtype."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return tuple((kind, str(torch.get_autocast_dtype(kind))) for kind in kinds)


def _fast_key(x: Any) -> Hashable:
    strides = tuple(x.stride()) if x.layout is torch.strided else None
    settings = _autocast(), torch.get_float32_matmul_precision()
    return tuple(x.shape), x.dtype, x.device, x.layout, strides, _wants_grad(x), settings


def _wants_grad(x: Any) -> bool:
    return bool(x.requires_grad and torch.is_grad_enabled())


class _Torch:
    """Answers the core's questions about calls with tensors."""

    def surroundings(self, arguments: object) -> Mapping[str, Any]:
        grad = [i for i, x in enumerate(arrays_in(arguments)) if describe(x).grad]
        precision = torch.get_float32_matmul_precision()
        found = {
            "grad": grad,
            "autocast": [list(one) for one in _autocast()],
            "precision": "" if precision == "highest" else precision,
        }
        unusual = {name: value for name, value in found.items() if value}
        return {"@torch": unusual} if unusual else {}

    def obstacle(self, arguments: object) -> str | None:
        tensors = _tensors(arguments)
        for x in tensors:
            if x.is_meta and not _is_fake(x):
                return "a tensor on the meta device has no values to measure on"
            if torch._C._functorch.is_functorch_wrapped_tensor(x):  # noqa: SLF001 - no public way to tell
                return "a tensor inside torch.func's transforms has no values to measure on"
        # A table's call has no tensors: its inputs would be made on the device.
        on_device = any(x.is_cuda for x in tensors) if tensors else torch.cuda.is_initialized()
        if on_device and torch.cuda.is_current_stream_capturing():
            return "a CUDA graph is being captured, and nothing else may run"
        return None

    def is_traced(self, arguments: object) -> bool:
        return any(map(_is_fake, _tensors(arguments)))

    def capture(self, inv: Invocation[Any, Any]) -> _CapturedTensorCall:
        return _CapturedTensorCall(inv)

    def bind(self, kernel: Kernel[Any, Any], inv: Invocation[Any, Any], cfg: Any) -> Callable[..., Any]:
        run = kernel.bind(inv, cfg)
        return partial(_run_with_own_backward, kernel, inv, cfg, run) if kernel.has_backward(inv) else run

    def jitted(self, function: Callable[..., T]) -> Callable[..., T]:
        return torch.compile(function)  # type: ignore[no-any-return] # torch is not seen by the type checker

    def labelled(self, function: Callable[..., T], label: str) -> Callable[..., T]:
        return torch.profiler.record_function(label)(function)  # type: ignore[no-any-return] # as above


def _is_fake(x: object) -> bool:
    return type(x).__name__ == "FakeTensor"


def _run_with_own_backward(
    kernel: Kernel[Any, Any], inv: Invocation[Any, Any], cfg: Any, run: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    places = [i for i, x in enumerate(args) if isinstance(x, torch.Tensor)]  # only tensors have gradients
    tensors = [args[i] for i in places]
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return run(*args, **kwargs)
    # Without the tensors: autograd keeps these functions, and must not keep tensors alive by them.
    constants = [None if i in places else x for i, x in enumerate(args)]

    def fill(tensors: Sequence[Any]) -> list[Any]:
        given = list(constants)
        for i, x in zip(places, tensors, strict=True):
            given[i] = x
        return given

    def forward(tensors: Sequence[Any]) -> tuple[Any, Any]:
        return kernel.variant("fwd_with_residuals", inv)(*fill(tensors), cfg=cfg, **kwargs)  # type: ignore[no-any-return]

    def backward(residuals: Any, dy: Any, tensors: Sequence[Any]) -> list[Any]:
        found = kernel.variant("vjp", inv)(residuals, dy, *fill(tensors), cfg=cfg, **kwargs)
        grads = tuple(found) if isinstance(found, (tuple, list)) else (found,)
        if len(grads) != len(constants):
            raise DefinitionError(
                f"the vjp of {kernel.op_id!r} returned {len(grads)} gradients for {len(constants)} positional "
                "arguments; return one for each, or None for an argument without a gradient"
            )
        return [grads[i] for i in places]

    return _OwnBackward.apply(forward, backward, *tensors)


class _OwnBackward(torch.autograd.Function):  # type: ignore[misc] # torch is not seen by the type checker
    """The forward pass saves the tensors in torch's own way, so torch raises if one is changed before the backward."""

    @staticmethod
    def forward(ctx: Any, forward: Callable[..., Any], backward: Callable[..., Any], *tensors: Any) -> Any:
        out, ctx.residuals = forward(tensors)
        ctx.own_backward = backward
        ctx.save_for_backward(*tensors)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator] # torch has no types
    def backward(ctx: Any, *dy: Any) -> Any:
        return None, None, *ctx.own_backward(ctx.residuals, dy[0] if len(dy) == 1 else dy, ctx.saved_tensors)


class _CapturedTensorCall:
    """A call, and the settings under which it was made."""

    def __init__(self, inv: Invocation[Any, Any]) -> None:
        self._inv = inv
        self._settings = inv.beside().get("@torch", {})
        self._is_traced = any(map(_is_fake, _tensors((inv.args, inv.kwargs))))

    @contextmanager
    def site(self) -> Iterator[tuple[TuningSite, Callable[..., Any]]]:
        """Give the call on the caller's own tensors, or on made-up tensors while the caller is being traced."""
        if not self._is_traced:
            with self._entered():
                yield self._make_site(), operator.call
            return
        from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - few calls are traced like this

        # A thread of our own, because the caller's thread traces every operator that runs in it.
        with ThreadPoolExecutor(1, thread_name_prefix="tunebook-torch") as pool:
            context = copy_context()

            def there(function: Callable[..., T], *args: Any) -> T:
                return pool.submit(context.run, self._call_entered, function, *args).result()

            yield there(self._make_site), there

    def _call_entered(self, function: Callable[..., T], *args: Any) -> T:
        with self._entered():
            return function(*args)

    @contextmanager
    def _entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            for kind, dtype in self._settings.get("autocast", ()):
                stack.enter_context(torch.autocast(kind, getattr(torch, dtype.removeprefix("torch."))))
            yield

    def _make_site(self) -> TuningSite:
        args, kwargs = self._inv.args, dict(self._inv.kwargs)
        if not self._is_traced:
            return self._site_with(args, kwargs)
        return self._site_with(*concrete(abstract((args, kwargs))))._replace(with_inputs=self._site_with)

    def _site_with(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TuningSite:
        inv = replace(self._inv, args=args, kwargs=kwargs)
        differentiable = bool(self._settings.get("grad"))
        return TuningSite(inv, args, kwargs, _TORCH.bind, _programs, lambda _bind, _config: differentiable)


def _programs(bind: Callable[[Any], Callable[..., Any]], backward: bool) -> Any:  # noqa: FBT001 - as in `TuningSite`
    """Return a function that makes the measured functions, and None: torch compiles nothing ahead."""

    def run_both(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        outputs = [x for x in _tensors(function(*args, **kwargs)) if x.requires_grad]
        inputs = [x for x in _tensors((args, kwargs)) if x.requires_grad]
        # An output stands in for its own gradient: it has the right shape and dtype, and ordinary values.
        return torch.autograd.grad(outputs, inputs, [x.detach() for x in outputs], allow_unused=True)

    return (lambda config: partial(run_both, bind(config))) if backward else bind, None


def _variant(x: Any) -> str:
    # A fake tensor stands for a plain tensor while a program is traced.
    return "" if _is_fake(x) else class_name(x, _PLAIN)


def _make(spec: ArraySpec, rng_seed: int) -> torch.Tensor:
    refuse_variant(spec)
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype) or not spec.layout.startswith(("C", "F", "P", "S")):
        raise Unsupported(f"cannot make up a tensor of {spec.dtype} and layout {spec.layout}; pass a live one")
    strides, offset, extent = strides_for(spec.layout, spec.shape)
    if offset:
        raise Unsupported("a tensor cannot have a dimension that runs backwards; pass a live array of its library")
    kind, _, ordinal = spec.platform.partition("#")
    device = torch.device(kind or "cpu") if kind != "gpu" else torch.accelerator.current_accelerator()
    if device is None:
        raise Unsupported("cannot make a tensor for a GPU: torch sees no GPU here. Tune on a machine with a GPU")
    if kind == "gpu" and ordinal:
        device = torch.device(device.type, int(ordinal))
    values = _values(dtype, extent, device, rng_seed)
    return values.as_strided(spec.shape, strides).requires_grad_(spec.grad)


def _values(dtype: torch.dtype, n: int, device: torch.device, rng_seed: int) -> torch.Tensor:
    """Return harmless values, made on the device: a gigabyte takes the host 3 s."""
    random = torch.Generator(device).manual_seed(rng_seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, (n,), generator=random, device=device).to(dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(1, 4, (n,), generator=random, device=device).to(dtype)
    wide = dtype if dtype.is_complex else torch.float32
    values = torch.randn(n, generator=random, device=device, dtype=wide)
    # Away from zero, where kernels divide.
    return (values + 0.25 * values.sgn()).to(dtype)


def _memory(x: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors whose elements are a tensor's values: itself, or the tensors that its class wraps."""
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as torch's own subclasses do
        if type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            names, _ = x.__tensor_flatten__() if hasattr(x, "__tensor_flatten__") else ((), None)
            return [part for name in names for part in _memory(getattr(x, name))]
        if x.layout is not torch.strided or x.is_meta or not x.numel():
            return []
        return [x.detach().as_subclass(torch.Tensor)]


def _copy(x: torch.Tensor) -> torch.Tensor:
    x = x.detach()
    if x.is_cuda and 2 * x.nbytes > _free_bytes(x.device):
        return x.cpu()  # slower to put back, but the kernel may need the rest of the GPU's memory
    return x.clone()


def _free_bytes(device: torch.device) -> int:
    """Return how much memory a GPU has left, including memory that torch has reserved and does not use."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0] + kept)


def _memory_and_copy(x: torch.Tensor, copy: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for part, kept in zip(_memory(x), _memory(copy), strict=True):
        # In a dimension of stride 0 all elements share one place in memory.
        index = tuple(slice(None) if stride else 0 for stride in part.stride())
        yield part[index], kept[index]


def _put_back(x: torch.Tensor, copy: torch.Tensor) -> None:
    with torch.inference_mode(x.is_inference()), torch.no_grad():
        for part, kept in _memory_and_copy(x, copy):
            part.copy_(kept)


def _is_same(x: torch.Tensor, copy: torch.Tensor) -> bool:
    parts = _memory_and_copy(x, copy)
    return all(torch.equal(_bytes(part.to(kept.device)), _bytes(kept)) for part, kept in parts)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor: a NaN is not equal to itself, its bytes are."""
    return x.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)


def _to_numpy(x: torch.Tensor) -> Any:
    x = x.detach()
    x = (x if x.layout is torch.strided else x.to_dense()).cpu().resolve_conj().resolve_neg()
    narrow = x.is_floating_point() and x.dtype not in (torch.float16, torch.float32, torch.float64)
    return (x.float() if narrow else x).numpy()  # numpy has no bfloat16, and float32 holds each of its values


def _known_values(x: torch.Tensor) -> Any:
    plain = type(x) in _PLAIN and x.layout is torch.strided and _TORCH.obstacle((x,)) is None
    return _to_numpy(x) if plain else None


def _with_values(x: torch.Tensor, values: Any) -> torch.Tensor:
    _put_back(x, torch.from_numpy(values.copy()))  # a copy, because torch warns of arrays that cannot be written to
    return x


def _is_close(x: torch.Tensor, y: torch.Tensor, tolerance: float) -> bool:
    plain = x.layout is y.layout is torch.strided and x.device == y.device
    if not plain or x.shape != y.shape or x.is_complex() or y.is_complex():
        return False
    x, y = x.detach(), y.detach()
    if not tolerance:
        return bool(x.dtype == y.dtype and torch.equal(x, y))
    wide = torch.float64 if torch.float64 in (x.dtype, y.dtype) else torch.float32
    x, y = x.to(wide), y.to(wide)
    # Relative to the largest value of the whole result, like the check on the host.
    scale = float(y.abs().nan_to_num(0.0, 0.0).amax()) or 1.0 if y.numel() else 1.0
    return torch.isclose(x, y, rtol=tolerance, atol=tolerance * scale, equal_nan=True).all().item() is True


class CudaTimer(EventTimer):
    """Times runs on one GPU by its own clock. `cuda` is `torch.cuda`, or stands in for it."""

    def __init__(
        self,
        device: Any,
        cuda: Any = torch.cuda,
        cache: Callable[[], Any] | None = None,
        *,
        warm: bool = False,
        way: str = "launch",
    ) -> None:
        make = cache or partial(torch.empty, CACHE_BYTES, dtype=torch.int8, device=device)
        super().__init__(lambda: cuda, make, way=way, warm=warm, on=partial(cuda.device, device))


def _timer(arguments: object) -> CudaTimer | None:
    return _timer_as(arguments, True, False)  # noqa: FBT003 - as in the record


def _timer_as(arguments: object, cold: bool, graph: bool) -> CudaTimer | None:  # noqa: FBT001 - a field of the record
    make = partial(CudaTimer, warm=not cold, way="graph" if graph else "launch")
    return next((make(x.device) for x in _tensors(arguments) if x.is_cuda), None)


def _graph(arguments: object) -> Callable[[Callable[[], object]], Replay] | None:
    return partial(Replay, device=torch.cuda) if any(x.is_cuda for x in _tensors(arguments)) else None


def custom_op(
    name: str,
    function: Tunable[Any],
    *,
    fake: Callable[..., Any] | None = None,
    device_types: str | Iterable[str] | None = None,
) -> Any:
    """Register a tunable function as the torch operator `"library::name"`, and return the operator.

    A program made by `torch.compile` holds the operator, and each run looks the configuration up: for shapes that
    change, and for kernels that the compiler cannot see into. Parameters need annotations that torch has a schema for.
    `fake` makes an output without values, like the real output; None is the function's reference. The arguments that
    the function mutates are declared to torch too. An operator adds 0.1 ms to a call that is not compiled.
    """
    kernel = getattr(function, "kernel", None)
    if not isinstance(kernel, FunctionKernel):
        raise DefinitionError(f"{function!r} is not tunable; decorate it with @tunebook.tunable(space=...)")
    fake = fake or kernel.reference
    if fake is None:
        raise DefinitionError(
            f"{name!r} needs a function that makes outputs without values: custom_op({name!r}, ..., "
            "fake=lambda x: torch.empty_like(x)), or give the tunable function a reference="
        )

    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    run.__dict__["__signature__"] = _annotated(kernel)
    operator = torch.library.custom_op(name, run, mutates_args=kernel.mutates or (), device_types=device_types)
    operator.register_fake(fake)
    return operator


def _annotated(kernel: FunctionKernel) -> inspect.Signature:
    """Return the signature without the configuration, and with classes in place of their names."""
    hints = typing.get_type_hints(kernel.function)
    parameters = [p.replace(annotation=hints.get(name, p.empty)) for name, p in kernel.parameters.items()]
    missing = [p.name for p in parameters if p.annotation is p.empty] + ["return"] * ("return" not in hints)
    if missing:
        raise DefinitionError(
            f"an operator of torch needs an annotation for {', '.join(missing)}: "
            f"def {kernel.function.__name__}(x: torch.Tensor, *, config) -> torch.Tensor"
        )
    returned = None if hints["return"] is NoneType else hints["return"]  # as torch spells it
    return inspect.Signature(parameters, return_annotation=returned)


# ----------------------------------------------------------------------------------------------------- the record


# The number of a device is read faster than the device; a tensor without data has the number of the host, and nothing
# about it is ever memoised. A sparse tensor has no strides, and raises a RuntimeError.
_READER: Final = ArgumentReader(
    "({0}.__class__ is _tb_torch_tensor or {0}.__class__ is _tb_torch_parameter)",
    "{0}.shape, {0}.dtype, {0}.get_device(), {0}.requires_grad",
    settings="_tb_torch_grad(), _tb_torch_autocast() and _tb_torch_autocast_dtypes(), _tb_torch_precision(), ",
    traced=True,
)
_READER_WITH_LAYOUT: Final = _READER._replace(fast=f"{_READER.fast}, {{0}}.is_contiguous() or {{0}}.stride()")


def _reader(kind: type, layout: bool) -> ArgumentReader | None:  # noqa: FBT001 - a field of the record
    if kind not in _PLAIN:
        return None
    return _READER_WITH_LAYOUT if layout else _READER


def _layout(x: Any, shape: tuple[int, ...]) -> str:
    kind = str(x.layout).removeprefix("torch.")
    return strided_layout(x, shape) if kind == "strided" else kind  # a sparse tensor raises when asked for its strides


def _hardware(device: Any) -> str:
    # torch.cuda and torch.xpu have this; torch.mps has one device only, without a name.
    ask = getattr(getattr(torch, device.type, None), "get_device_properties", None)
    return str(device.type if ask is None else ask(device).name)


def _accelerator() -> object | None:
    if not hasattr(torch, "accelerator"):  # before torch 2.6
        return torch.device("cuda") if torch.cuda.is_available() else None
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


_TORCH: Final = _Torch()
register_array_library(
    ArrayLibrary(
        name="torch",
        layout=_layout,
        grad=_wants_grad,
        variant=_variant,
        hardware=_hardware,
        properties=lambda d: read_torch(torch.cuda.get_device_properties(d)) if d.type == "cuda" else None,
        accelerator=_accelerator,
        is_writable=lambda x: bool(_memory(x)),
        copy=_copy,
        is_same=_is_same,
        put_back=_put_back,
        is_restorable=lambda x: not _is_fake(x),
        to_numpy=_to_numpy,
        is_close=_is_close,
        fast_key=_fast_key,
        reader=_reader,
        hot_names={
            "_tb_torch_tensor": torch.Tensor,
            "_tb_torch_parameter": torch.nn.Parameter,
            "_tb_torch_grad": torch.is_grad_enabled,
            "_tb_torch_autocast": torch._C._is_any_autocast_enabled,  # noqa: SLF001 - the public one asks for one device
            "_tb_torch_autocast_dtypes": _autocast,
            "_tb_torch_precision": torch.get_float32_matmul_precision,
        },
        dtype_text=lambda value: str(value) if isinstance(value, torch.dtype) else None,
        timer=_timer,
        timer_as=_timer_as,
        graph=_graph,
        make=_make,
        values=_known_values,
        with_values=_with_values,
        framework=_TORCH,
        compiling=torch.compiler.is_dynamo_compiling,
    )
)


def __dir__() -> list[str]:
    return sorted(__all__)
