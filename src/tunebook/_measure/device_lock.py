"""One process at a time measures on a physical device of this host; others wait for their turn, but not for ever.

A lock is a byte of a file, locked by `fcntl`. On one host that is sound, unlike for leases (see `single_flight`),
which span hosts and mounts: the kernel releases the lock when the process ends, however it ends, and a forked child
does not inherit it, so a worker that outlives its parent does not block the others. The files are in a directory of
the user's on this host, because a home directory may be on a mount without working locks, and another host's GPU is
another GPU. Processes in other containers or of other users are not seen here; the probes of `disturbance` may see
their work.

The lock is held while candidates run, not while they compile. A process that has waited as long as allowed in one
tuning measures all the same, and both report a disturbance.

A kernel may call other kernels, whose first calls are tuned too. So a thread that waits for the tuning of another
thread or process puts its devices down meanwhile. And if the holder of a device waits for other threads, a thread that
wants the device goes ahead of it: the holder may be waiting for that very thread.
"""

from __future__ import annotations

import fcntl
import io
import math
import os
import stat
import sys
import threading
import time
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Protocol

from tunebook._arrays.describe import devices_in, platform_of
from tunebook._base.environment_variables import lock_root
from tunebook._base.record_format import blake2b
from tunebook.stores._files import FaultsAreWarnings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path
    from types import FrameType

# Two bytes of the file: the next process in line holds the turn. Without it, a process that tunes one problem after
# another would have the device again before a waiting process looks.
_TURN: Final = 0
_DEVICE: Final = 1
_WITHOUT_LOCKS: Final = "processes that tune at the same time cannot wait for each other: "
_MARK: Final = (8, 16)  # length and offset of the bytes that a process measuring without the lock changes

# A thread of this process waits for at most this long for a device whose holder waits for other threads: too long for a
# kernel that spreads its work over threads, and not too long to wait for in a first call.
_STUCK_S: Final = 1.0
_LOOK_S: Final = 0.05  # how often it looks
# A kernel that waits for other threads has frames of these packages on top of its own.
_WAITING: Final = frozenset({"asyncio", "concurrent", "multiprocessing", "queue", "selectors", "threading"})

# The claims of the threads of this process, by device and by the claim that a claim goes ahead of: file locks belong to
# the process. No lock, because `setdefault` is atomic. Emptied in a forked child, which holds no lock.
_held: Final[dict[tuple[str, _DeviceClaim | None], _DeviceClaim]] = {}
os.register_at_fork(after_in_child=_held.clear)


# The devices held in this context, so that nested tunings do not wait for themselves.
_holds: ContextVar[tuple[_DeviceHold, ...]] = ContextVar("tunebook_devices", default=())


class WorkOfThread(Protocol):
    """Work that a thread does, and the place at which that was found stuck, for a `StuckWatch`."""

    @property
    def thread(self) -> int: ...

    stuck_at: object


class StuckWatch:
    """A waiter's view of a thread: for how long the kernel that runs there has waited for other threads."""

    def __init__(self, limit_s: float, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._clock_s = limit_s, clock_s
        self._place: object = None
        self._since_s = 0.0

    def is_stuck(self, work: WorkOfThread) -> bool:
        """Whether it has waited too long, by this or by an earlier watch."""
        place, now_s = place_of_wait(work.thread), self._clock_s()
        if place is None:
            return False
        if place != self._place:
            self._place, self._since_s = place, now_s
        if now_s - self._since_s >= self._limit_s:
            work.stuck_at = place
        return place == work.stuck_at


def place_of_wait(thread: int) -> object | None:
    """Return the place at which a kernel in a thread waits for other threads; None if it runs, or waits in our code.

    >>> place_of_wait(threading.get_ident()) is None
    True
    """
    top = frame = sys._current_frames().get(thread)  # noqa: SLF001 - documented, for debuggers
    while frame is not None and _module(frame).partition(".")[0] in _WAITING:
        frame = frame.f_back
    if top is None or frame is top or frame is None or _module(frame).startswith("tunebook."):
        return None
    return id(top), top.f_lasti


def _module(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name


class _DeviceClaim:
    """A thread's claim to a device: among threads by its place in `_held`, among processes by a lock on a file."""

    def __init__(self, name: str) -> None:
        self.name: Final = name
        self.thread: Final = threading.get_ident()
        self.stuck_at: object = None
        self.key: tuple[str, _DeviceClaim | None] = (name, None)
        self.released: Final = threading.Event()
        self.file: io.FileIO | None = None
        self.mark: bytes | None = None  # of the last intruder, if the file is locked

    @property
    def intruded(self) -> bool:
        """Whether another process has measured without the lock since."""
        with suppress(OSError):
            if self.file is not None and self.mark is not None:
                return os.pread(self.file.fileno(), *_MARK) != self.mark
        return False

    def release(self) -> None:
        """Release the device. Does nothing the second time, and leaves the parent's lock alone in a forked child."""
        if self.file is not None:
            with suppress(OSError):
                self.file.close()  # and with it the lock: this was the only descriptor of the process
        if _held.get(self.key) is self:
            self.released.set()
            _held.pop(self.key, None)


class _DeviceHold:
    """The devices that a turn has. Leaving it twice does no harm, so it is entered twice, as a flight is.

    `names` are emptied after the turn, for copies of the context that outlive it.
    """

    def __init__(self, turn: DeviceTurn, names: Sequence[str]) -> None:
        self.turn, self.names = turn, set(names)
        self.claims: Final[list[_DeviceClaim]] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.names.clear()
        _holds.set(tuple(hold for hold in _holds.get() if hold is not self))
        self.release()

    def release(self) -> None:
        """Let others have the devices."""
        for claim in self.claims:
            claim.release()
        self.claims.clear()


@contextmanager
def turns_put_down() -> Iterator[None]:
    """Let others have the devices of this context inside the block, and take them again after it."""
    holds = [hold for hold in _holds.get() if hold.claims]
    for hold in holds:
        hold.release()
    try:
        yield
    finally:
        for hold in holds:
            if not hold.claims:  # several threads of one context may wait at a time
                hold.turn.take(hold)


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
        """Hold the devices inside the block, after a wait of at most `at_most_s`, and of the turn's limit in all."""
        outer = _holds.get()
        wanted = [name for name in self._names if not any(name in hold.names for hold in outer)]
        if not wanted:
            yield
            return
        self._shared.clear()
        hold = _DeviceHold(self, wanted)
        with hold, hold:
            self.take(hold, at_most_s)
            _holds.set((*outer, hold))
            yield

    def take(self, hold: _DeviceHold, at_most_s: float = math.inf) -> None:
        """Wait for the devices of a hold, and claim those that are free in time."""
        self._claims, began_s = hold.claims, self._clock_s()
        deadline_s = began_s + max(min(self._wait_s, at_most_s), 0.0)
        root = self._root or lock_root()
        for name in sorted(hold.names):
            claim = _DeviceClaim(name)
            hold.claims.append(claim)  # first, so that an interrupt leaves no claim behind
            if not self._enter(claim, deadline_s):
                self._shared.append(f"another thread of this process measured on {name} at the same time")
            elif claim.key[1] is None:
                with FaultsAreWarnings(str(root), before=_WITHOUT_LOCKS, after=". See TUNEBOOK_LOCKS."):
                    self._lock(claim, root, deadline_s)
        self._wait_s -= self._clock_s() - began_s

    def _enter(self, claim: _DeviceClaim, deadline_s: float) -> bool:
        """Wait for the other threads of this process; False if the time was up."""
        watch = StuckWatch(_STUCK_S, self._clock_s)
        while (holder := _held.setdefault(claim.key, claim)) is not claim:
            left_s = deadline_s - self._clock_s()
            if watch.is_stuck(holder):
                claim.key = (claim.name, holder)
            elif left_s <= 0:
                return False
            else:
                holder.released.wait(min(left_s, _LOOK_S))
        return True

    def start(self) -> None:
        """Do nothing: the turn has begun before."""

    def disturbances(self) -> Iterable[str]:
        """Report processes that measured at the same time; to be called within the turn."""
        intruded = [f"another process measured on {claim.name} meanwhile" for claim in self._claims if claim.intruded]
        return (*self._shared, *intruded)

    def _lock(self, claim: _DeviceClaim, root: Path, deadline_s: float) -> None:
        """Lock the file of a device, unless the time is up before; `OSError` if locks do not work or a disk is full."""
        claim.file, name = _open(root, claim.name), claim.name
        descriptor = claim.file.fileno()
        if self._wait(descriptor, _TURN, deadline_s) and self._wait(descriptor, _DEVICE, deadline_s):
            fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, _TURN)
            # In place: ext4 flushes a truncated and rewritten file to the disk at its close, which takes 1.6 ms.
            os.pwrite(descriptor, b"%-15d\n" % os.getpid(), 0)
            claim.mark = os.pread(descriptor, *_MARK)
            return
        holder = os.pread(descriptor, 15, 0).decode("ascii", "replace").strip()
        os.pwrite(descriptor, os.urandom(_MARK[0]), _MARK[1])
        claim.file.close()
        self._shared.append(f"process {holder} measured on {name} at the same time, and was not waited for any longer")

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


def _open(root: Path, name: str) -> io.FileIO:
    """Open the file of a device, in a directory that only this user can write to."""
    kind = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        directory = os.open(root, kind)
    except FileNotFoundError:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory = os.open(root, kind)
    try:
        facts = os.fstat(directory)
        if facts.st_uid != os.geteuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"{root} belongs to another user, or others may write to it")
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return io.FileIO(f"{name}.lock", "r+", opener=lambda path, _: os.open(path, flags, 0o600, dir_fd=directory))
    finally:
        with suppress(OSError):
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
