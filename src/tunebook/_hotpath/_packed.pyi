from collections.abc import Callable
from typing import Any

def packer(
    ndarray: type | None, layout: bool, jax: tuple[object, ...] | None = None, /
) -> Callable[..., bytes | None]: ...
def finder(
    pack: Callable[..., bytes | None],
    memo: dict[Any, Any],
    otherwise: Callable[[bytes], Any],
    told: dict[Any, Any] = ...,
    scoped: Callable[[], object] = ...,
    /,
) -> Callable[..., Any]: ...
