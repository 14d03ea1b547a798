"""One process at a time measures on a physical device of this host; others wait for their turn, but not for ever.

A lock is a byte of a file, locked by `fcntl`. On one host that is sound, unlike for leases (see `single_flight`),
which span hosts and mounts: the kernel releases the lock when the process ends, however it ends, and a forked child
does not inherit it, so a worker that outlives its parent does not block the others. The files are in a directory of
the user's on this host, because a home directory may be on a mount without working locks, and another host's GPU is
another GPU. Processes in other containers or of other users are not seen here; the probes of `disturbance` may see
their work.

The lock is held while candidates run, not while they compile. A process that has waited as long as allowed measures
all the same, and both report a disturbance. So no process waits for ever, not even two processes of which one has this
lock and the other a lease that it needs.
"""

from __future__ import annotations

import fcntl
import os
import stat
import threading
import time
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tunebook._arrays.describe import devices_in, platform_of
from tunebook._base.environment_variables import lock_root
from tunebook._base.errors import warn_once
from tunebook._base.record_format import blake2b

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

# Two bytes of the file: the next process in line holds the turn. Without it, a process that tunes one problem after
# another would have the device again before a waiting process looks.
_TURN: Final = 0
_DEVICE: Final = 1
_MARK: Final = (8, 16)  # length and offset of the bytes that a process measuring without the lock changes

# For the threads of this process: file locks belong to the process. Emptied in a forked child, which holds no lock.
_mutexes: Final[dict[str, threading.Lock]] = {}
os.register_at_fork(after_in_child=_mutexes.clear)


# The devices held in this context, so that nested tunings do not wait for themselves. A set is emptied after its turn,
# for copies of the context that outlive it.
_holds: ContextVar[tuple[set[str], ...]] = ContextVar("tunebook_devices", default=())


class _DeviceClaim(NamedTuple):
    """A device held by this process: the file, the last intruder's mark in it, and the mutex among its threads."""

    name: str
    descriptor: int
    mark: bytes
    mutex: threading.Lock

    @property
    def intruded(self) -> bool:
        """Whether another process has measured without the lock since."""
        return os.pread(self.descriptor, *_MARK) != self.mark

    def release(self) -> None:
        """Release the device; does nothing in a forked child, which holds no lock."""
        if _mutexes.get(self.name) is self.mutex:
            os.close(self.descriptor)  # and with it the lock: this was the only descriptor of the process
            self.mutex.release()


class DeviceTurn:
    """Takes turns on devices. Also a probe: it reports other processes that measured during the last turn."""

    def __init__(
        self,
        names: Sequence[str],
        wait_s: float,
        *,
        root: Path | None = None,
        clock_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        # Sorted: two processes with two devices each must not wait for each other.
        self._names, self._wait_s, self._root = sorted(set(names)), wait_s, root
        self._clock_s, self._sleep = clock_s, sleep
        self._shared: list[str] = []
        self._claims: list[_DeviceClaim] = []

    @contextmanager
    def taken(self, at_most_s: float) -> Iterator[None]:
        """Hold the devices inside the block, after a wait of at most `at_most_s` and the turn's own limit."""
        outer = _holds.get()
        wanted = [name for name in self._names if not any(name in hold for hold in outer)]
        if not wanted:
            yield
            return
        self._shared.clear()
        hold = set(wanted)
        deadline_s = self._clock_s() + min(self._wait_s, max(at_most_s, 0.0))
        with ExitStack() as claims:
            for name in wanted:
                self._claim(name, deadline_s, claims)
            token = _holds.set((*outer, hold))
            try:
                yield
            finally:
                hold.clear()
                _holds.reset(token)
                self._claims.clear()

    def start(self) -> None:
        """Do nothing: the turn has begun before."""

    def disturbances(self) -> Iterable[str]:
        """Report processes that measured at the same time; to be called within the turn."""
        intruded = [f"another process measured on {claim.name} meanwhile" for claim in self._claims if claim.intruded]
        return (*self._shared, *intruded)

    def _claim(self, name: str, deadline_s: float, claims: ExitStack) -> None:
        mutex = _mutexes.setdefault(name, threading.Lock())
        if not mutex.acquire(timeout=max(deadline_s - self._clock_s(), 0.0)):
            self._shared.append(f"another thread of this process measured on {name} at the same time")
            return
        with ExitStack() as unless_claimed:
            unless_claimed.callback(mutex.release)
            claim = self._lock(name, deadline_s, mutex)
            if claim is not None:
                unless_claimed.pop_all()
                claims.callback(claim.release)
                self._claims.append(claim)

    def _lock(self, name: str, deadline_s: float, mutex: threading.Lock) -> _DeviceClaim | None:
        """Return the claim; None if the time was up, or locks do not work."""
        root = self._root or lock_root()
        try:
            descriptor = _open(root, name)
        except OSError as error:
            message = f"processes that tune at the same time cannot wait for each other: {error}. See TUNEBOOK_LOCKS."
            warn_once("device-lock", str(root), message)
            return None
        with ExitStack() as unless_locked:
            unless_locked.callback(os.close, descriptor)
            if self._wait(descriptor, _TURN, deadline_s) and self._wait(descriptor, _DEVICE, deadline_s):
                fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, _TURN)
                # In place: ext4 flushes a truncated and rewritten file to the disk at its close, which takes 1.6 ms.
                os.pwrite(descriptor, b"%-15d\n" % os.getpid(), 0)
                claim = _DeviceClaim(name, descriptor, os.pread(descriptor, *_MARK), mutex)
                unless_locked.pop_all()
                return claim
            holder = os.pread(descriptor, 15, 0).decode("ascii", "replace").strip()
            os.pwrite(descriptor, os.urandom(_MARK[0]), _MARK[1])
            reason = f"process {holder} measured on {name} at the same time, and was not waited for any longer"
            self._shared.append(reason)
        return None

    def _wait(self, descriptor: int, byte: int, deadline_s: float) -> bool:
        wait_s, longest_s = 0.002, 0.02  # between two looks
        while True:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
            except (BlockingIOError, PermissionError):  # POSIX allows either
                left_s = deadline_s - self._clock_s()
                if left_s <= 0:
                    return False
                self._sleep(min(wait_s, left_s))
                wait_s = min(2 * wait_s, longest_s)
            else:
                return True


def _open(root: Path, name: str) -> int:
    """Open the file of a device, in a directory that only this user can write to."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        facts = os.fstat(directory)
        if facts.st_uid != os.geteuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"{root} belongs to another user, or others may write to it")
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(f"{name}.lock", flags, 0o600, dir_fd=directory)
    finally:
        os.close(directory)


# -------------------------------------------------------------------------------------------------- which device it is


def physical_devices(arguments: object, platform: str, ordinal: int | None = None) -> tuple[str, ...]:
    """Return the names of the devices that calls with some arguments run on; all processes of a host use the same.

    `ordinal` is the number of a GPU, if the arguments do not tell. The host's processor is one device, "cpu": kernels
    on it share the caches and the memory bus of all cores.
    """
    if platform == "cpu":
        return ("cpu",)
    if ordinal is not None:
        return (physical_name(platform, ordinal),)
    found = {_name_of(device) for device in devices_in(arguments) if platform_of(device) == platform}
    return tuple(sorted(found)) or (physical_name(platform, 0),)


def _name_of(device: Any) -> str:
    kind = platform_of(device)
    ordinal = getattr(device, "local_hardware_id", None)  # jax
    for attribute in ("index", "id"):  # torch, cupy
        ordinal = getattr(device, attribute, None) if ordinal is None else ordinal
    if isinstance(ordinal, int):
        return physical_name(kind, ordinal)
    # OpenCL's devices have no number. Two equal models wait for each other, which only costs time.
    text = getattr(device, "name", None) or str(device)
    return f"{kind}-{blake2b(str(text).encode(), digest_size=8).hexdigest()}"


@cache
def physical_name(platform: str, ordinal: int) -> str:
    """Return the host-wide name of a device by its number in this process; other processes may number it otherwise."""
    uuid = cuda_uuid(ordinal) if platform == "gpu" else None
    return f"{platform}-{ordinal}" if uuid is None else f"{platform}-{uuid}"


def cuda_uuid(ordinal: int, library: str = "libcuda.so.1") -> str | None:
    """Return the UUID of an NVIDIA GPU by its number in this process, as 32 digits; None without a driver.

    From the driver itself, because it numbers devices as frameworks do: in the order of CUDA_VISIBLE_DEVICES. A slice
    of a GPU (MIG) has a UUID too, and counts as a device.
    """
    ctypes, driver = _driver(library)
    if driver is None:
        return None
    device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    if driver.cuDeviceGet(ctypes.byref(device), ordinal) or driver.cuDeviceGetUuid_v2(uuid, device):
        return None
    return bytes(uuid).hex()


def cuda_names(library: str = "libcuda.so.1") -> tuple[str, ...]:
    """Return the names of the NVIDIA GPUs that this process may use, as frameworks give them; () without a driver."""
    ctypes, driver = _driver(library)
    if driver is None:
        return ()
    count, device, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
    driver.cuDeviceGetCount(ctypes.byref(count))
    return tuple(
        name.value.decode("utf-8", "replace")
        for ordinal in range(count.value)
        if not driver.cuDeviceGet(ctypes.byref(device), ordinal) and not driver.cuDeviceGetName(name, 256, device)
    )


@cache
def _driver(library: str) -> tuple[Any, Any]:
    """Return `ctypes`, and CUDA's driver if it is usable."""
    import ctypes  # noqa: PLC0415 - loaded late: 2 ms

    try:
        driver = ctypes.CDLL(library)
        ready = driver.cuInit(0) == 0 and driver.cuDeviceGetUuid_v2 is not None
    except (OSError, AttributeError):  # no driver, or one from before 11.4
        return ctypes, None
    return ctypes, driver if ready else None
