"""Running candidates in a child process, so that one that hangs or crashes costs one candidate and not the job.

The child is a fork of this process: it has the arguments, the compiled code and every closure, and nothing is
pickled. That suits kernels on the CPU: numpy, C through ctypes, Numba. It does not suit a process that already uses
CUDA (a context does not survive a fork), or whose other threads hold locks when it forks. An OpenMP runtime that has
run in the parent may hang or abort in the child; that costs each candidate its timeout, and never the job.

Not covered: a process that a candidate moves to a session of its own outlives the worker, and so does any that it is
waiting for when the parent is killed. A candidate that writes out of bounds may make a later one crash, which is why a
crash says how many ran before it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import resource
import select
import signal
import struct
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn, Self, TypeAlias

from tunebook._base.errors import Unsupported
from tunebook._base.vocabulary import Failure
from tunebook._measure.stopwatch import failed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType

    Launch: TypeAlias = Callable[[], object]
    Found: TypeAlias = Sequence[float] | Failure

_REQUEST: Final = struct.Struct("<qq")  # the candidate, and the number for `sample`: 0 asks for `first`
_LENGTH: Final = struct.Struct("<q")
_CHUNK: Final = 1 << 16  # what a pipe holds on Linux
_TAIL: Final = 2048  # bytes of output, and of a message, that are kept
_GLANCE_MS: Final = 50  # how often to look for a death that closed no pipe, because a grandchild holds it open
_SPARE_BYTES: Final = 8 << 20  # address space, let go when a traceback has to be written and there is no other left
_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one request may cost.

    `timeout_s` is for the whole request: building, the first run, and all that is sampled at once. `memory_bytes` is
    address space on top of what the process has when it forks, and holds for all candidates of one worker together.
    """

    timeout_s: float = 60.0
    memory_bytes: int | None = None


class Reply(NamedTuple):
    """What came of one request. `remote` is the child's traceback, or the last 2 kB that it printed."""

    samples_s: tuple[float, ...] = ()
    failure: Failure | None = None
    remote: str = ""


class ChildTask(NamedTuple):
    """What the child does. All of it is called in the child only, so what it changes is not seen by the parent.

    `build` is called once per candidate and child. `first` runs it for the first time, checks the result and warms up;
    `sample` measures it, with the number given to `ForkedWorker.sample`. Both return seconds, or the failure; an
    exception becomes a failure too.
    """

    build: Callable[[int], Launch]
    first: Callable[[Launch], Found]
    sample: Callable[[Launch, int], Found]


class ForkedWorker:
    """A child process that runs candidates, and is forked anew after it was lost. For one thread at a time.

    The first request forks; a context manager, because leaving it ends the child. Where this process dies, even by
    SIGKILL, the child goes too: at once on Linux, elsewhere when the candidate that it is running returns.
    """

    def __init__(
        self,
        job: ChildTask,
        limits: Limits | None = None,
        calm: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """`calm` keeps the other threads of this process from holding locks while it forks."""
        if getattr(os, "fork", None) is None:
            raise Unsupported(
                f"candidates cannot be isolated on {sys.platform}: there is no fork. Tune with isolate='never'."
            )
        self._job = job
        self._limits = limits or Limits()
        if self._limits.memory_bytes is not None and sys.platform != "linux":
            raise Unsupported(f"memory_bytes= needs Linux; this is {sys.platform}. Leave it out.")
        self._calm = calm
        self._child: _Child | None = None

    def prepare(self, index: int) -> Reply:
        """Build candidate `index` if this child has not, and return what `first` found."""
        return self._request(index, 0)

    def sample(self, index: int, number: int) -> Reply:
        """Return what `sample` found; in a child that does not know the candidate yet, prepare it first.

        `number` is at least 1, and means what `sample` takes it for: samples to take, or runs to a sample.
        """
        return self._request(index, number)

    def close(self) -> None:
        """End the child and all processes in its group. A later request would fork again."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _request(self, index: int, number: int) -> Reply:
        keep = False
        try:
            child = self._living_child()
            answer = child.ask(index, number, time.monotonic() + self._limits.timeout_s)
            if answer is None:
                answer = self._lost(child)
            else:
                # After a MemoryError the child may be full of what earlier candidates left; the next one starts clean.
                keep = answer.failure is None or answer.failure.kind != "memory"
            return answer
        finally:  # also when Ctrl-C comes while waiting: the answer to this request must not be read as the next one's
            if not keep:
                self.close()

    def _living_child(self) -> _Child:
        # One that died between two requests was no candidate's doing: on Linux it goes with the thread that forked it.
        if self._child is not None and self._child.has_ended():
            self.close()
        if self._child is None:
            with self._calm(), _signals_held():
                self._child = _fork(self._job, self._limits)
        return self._child

    def _lost(self, child: _Child) -> Reply:
        late = not child.has_ended()
        self.close()
        if late:
            failure = Failure(kind="timeout", message=f"no answer within {self._limits.timeout_s:g} s")
        else:
            failure = _death(child.status, len(child.seen) - 1)
        return Reply(failure=failure, remote=child.printed.decode(errors="replace"))


def _death(status: int | None, others: int) -> Failure:
    """Return the failure of a candidate that took its process with it; `status` is None if somebody else reaped it."""
    after = f" (candidates that ran in the same process before: {others})" if others else ""
    if status is None:
        return Failure(kind="crash", message=f"the process is gone; its status was collected elsewhere{after}")
    if status >= 0:
        return Failure(kind="crash", message=f"the process exited with status {status}{after}")
    try:
        name = signal.Signals(-status).name
    except ValueError:  # the real-time signals between SIGRTMIN and SIGRTMAX have no names
        name = f"signal {-status}"
    if -status == signal.SIGKILL:
        # We send it too, but only to a child that is late, and that is a timeout.
        return Failure(kind="memory", message=f"killed by {name}, as the system does when memory runs out{after}")
    return Failure(kind="crash", message=f"killed by {name}{after}")


class _Child:
    """The parent's end of one child process: its id, its pipes, and the last that it printed."""

    def __init__(self, pid: int, requests: int, answers: int, output: int) -> None:
        self.seen: set[int] = set()
        self.printed = b""
        self.status: int | None = None
        self._pid = pid
        self._requests, self._answers, self._output = requests, answers, output
        self._open = {answers, output}
        self._ended = False
        for descriptor in self._open:
            os.set_blocking(descriptor, False)

    def ask(self, index: int, number: int, deadline: float) -> Reply | None:
        """Return the answer, or None if the child ended or has not answered by the deadline."""
        self.seen.add(index)
        self.printed = b""
        with contextlib.suppress(BrokenPipeError):  # it is ending, and soon there is a status that says how
            os.write(self._requests, _REQUEST.pack(index, number))
        received = b""
        while (left_s := deadline - time.monotonic()) > 0:
            ended = self.has_ended()
            received += self._read(left_s, ended=ended)
            if len(received) >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(received)
                if len(received) == _LENGTH.size + length:
                    return _decoded(received[_LENGTH.size :])
            if ended:
                return None
        return None

    def _read(self, left_s: float, *, ended: bool) -> bytes:
        """Wait for a moment, keep the tail of what was printed, and return what came as an answer."""
        # A closed pipe means that the child is ending: soon there is a status to collect.
        pause_ms = 0 if ended else _GLANCE_MS if self._answers in self._open else 1
        poll = select.poll()
        for descriptor in self._open:
            poll.register(descriptor, select.POLLIN)
        answer = b""
        for descriptor, _ in poll.poll(min(pause_ms, left_s * 1e3)):
            chunk = os.read(descriptor, _CHUNK)
            if not chunk:
                self._open.discard(descriptor)
            elif descriptor == self._answers:
                answer = chunk
            else:
                self.printed = (self.printed + chunk)[-_TAIL:]
        return answer

    def has_ended(self) -> bool:
        """Collect the status if there is one."""
        if not self._ended:
            self._collect(os.WNOHANG)
        return self._ended

    def _collect(self, options: int) -> None:
        try:
            pid, status = os.waitpid(self._pid, options)
        except ChildProcessError:  # the program ignores SIGCHLD, or waits for any child
            self._ended = True
            return
        if pid:
            self._ended, self.status = True, os.waitstatus_to_exitcode(status)

    def kill(self) -> None:
        """End the child with its process group, collect it, and close the pipes. Nothing is left of it."""
        # The group first, also of a child that has ended: its own children may live. PermissionError is what macOS
        # says of a group of zombies.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)
        if not self._ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)  # it may not have had the time to become a group
            self._collect(0)
        descriptors, self._open = {self._requests, self._answers, self._output}, set()
        for descriptor in descriptors:
            os.close(descriptor)


def _decoded(answer: bytes) -> Reply:
    fields = json.loads(answer)
    failure = None if fields["kind"] is None else Failure(kind=fields["kind"], message=fields["message"])
    return Reply(tuple(fields["samples_s"]), failure, fields["remote"])


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Let no signal in between the fork and the child's first lines, nor before the parent knows whom to end.

    A KeyboardInterrupt there would unwind through the parent's code in the child.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _fork(job: ChildTask, limits: Limits) -> _Child:
    prctl = _prctl()
    parent = os.getpid()
    (asked, requests), (answers, answered), (output, printed) = os.pipe(), os.pipe(), os.pipe()
    mine, parents = (asked, answered, printed), (requests, answers, output)
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of other threads, and JAX of its own; what they mean here is said atop this module.
            warnings.simplefilter("ignore")
            pid = os.fork()
    except OSError:  # too many processes
        for descriptor in (*mine, *parents):
            os.close(descriptor)
        raise
    if pid == 0:
        _live(job, limits, parent, prctl, mine, parents)
    for descriptor in mine:
        os.close(descriptor)
    return _Child(pid, *parents)


def _prctl() -> Callable[[int, int], int] | None:
    if sys.platform != "linux":
        return None
    import ctypes  # noqa: PLC0415 - for those alone who isolate; and before the fork, because imports take locks

    return ctypes.CDLL(None).prctl


# ---- What follows runs in the child. ----


def _live(
    job: ChildTask,
    limits: Limits,
    parent: int,
    prctl: Callable[[int, int], int] | None,
    mine: tuple[int, int, int],
    parents: tuple[int, int, int],
) -> NoReturn:
    """Serve until there is nobody to serve. Never returns, and runs no exit handler: those are the parent's."""
    try:
        os.setsid()  # a group to be killed as one; and Ctrl-C in the terminal is not for it
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before it could be watched
            os._exit(0)
        asked, answered, printed = mine
        for descriptor in parents:
            os.close(descriptor)
        _redirect(printed)
        _reset_signals()
        # The parent's garbage is the parent's to collect: its finalizers would remove temporary files still in use.
        gc.freeze()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # or each crash could leave a file as big as the process
        spare = [bytes(_SPARE_BYTES)]
        if limits.memory_bytes is not None:
            _limit_memory(limits.memory_bytes)
        _serve(job, spare, asked, answered)
        os.killpg(0, signal.SIGKILL)  # the parent is gone; what candidates have started goes with us
    finally:
        os._exit(1)


def _redirect(printed: int) -> None:
    """Send what is printed down a pipe of which the parent keeps the end: a gigabyte takes 2 kB."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    # The parent's objects may write elsewhere (a notebook, a test runner), hold unwritten text, or be locked.
    sys.stdout = sys.stderr = open(1, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115 - kept
    # It would write to the parent's stderr; and to ours, the parent's stack, instead of what the candidate said last.
    faulthandler.disable()


def _reset_signals() -> None:
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _limit_memory(more_bytes: int) -> None:
    """Allow so much address space more than there is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", "rb") as statm:  # noqa: PTH123 - nothing but a read, in a forked process
        now_bytes = int(statm.read().split()[0]) * resource.getpagesize()
    limit = now_bytes + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit if soft < 0 else min(soft, limit), hard))


def _serve(job: ChildTask, spare: list[bytes], asked: int, answered: int) -> None:
    me = os.getpid()
    launches: dict[int, Launch] = {}
    while request := os.read(asked, _REQUEST.size):
        index, number = _REQUEST.unpack(request)
        answer = _attempt(job, spare, launches, index, number)
        if os.getpid() != me:  # the candidate forked, and this is its child: one answer is enough
            os._exit(0)
        text = json.dumps(answer).encode()
        unsent = memoryview(_LENGTH.pack(len(text)) + text)
        while unsent:
            unsent = unsent[os.write(answered, unsent) :]


def _attempt(
    job: ChildTask, spare: list[bytes], launches: dict[int, Launch], index: int, number: int
) -> dict[str, object]:
    try:
        found, remote = _work(job, launches, index, number), ""
    except BaseException as error:  # noqa: BLE001 - a kernel may raise anything, and SystemExit must not end the child
        if isinstance(error, MemoryError):
            spare.clear()  # to say so takes memory too
        found, remote = _failure(error), "".join(traceback.format_exception(error))[-_TAIL:]
    if isinstance(found, Failure):
        launches.pop(index, None)
        return {"kind": found.kind, "message": found.message[:_TAIL], "samples_s": [], "remote": remote}
    return {"kind": None, "message": "", "samples_s": [float(s) for s in found], "remote": remote}


def _work(job: ChildTask, launches: dict[int, Launch], index: int, number: int) -> Found:
    known = index in launches
    if not known:
        launches[index] = job.build(index)
    if not known or not number:
        found = job.first(launches[index])
        if isinstance(found, Failure) or not number:
            return found
    return job.sample(launches[index], number)


def _failure(error: BaseException) -> Failure:
    failure = failed(error).failure if isinstance(error, Exception) else None
    # SystemExit would have ended the program.
    return failure or Failure(kind="crash", message=f"{type(error).__name__}: {error}")
