"""Running candidates in a child process, so that a candidate that hangs or crashes does not end the job.

The child is a fork of this process: it has the arguments, the compiled code and every closure, and nothing is
pickled. That suits kernels on the CPU: numpy, C through ctypes, Numba. It does not suit a process that already uses
CUDA (a context does not survive a fork), or whose other threads hold locks when it forks. An OpenMP runtime that has
run in the parent may hang or abort in the child; that costs each candidate its timeout, and never the job.

Not covered: a process that a candidate moves to a new session outlives the worker, and so does a process that the
candidate is waiting for when the parent is killed. A candidate that writes out of bounds may make a later one crash,
which is why the message of a crash counts the candidates that ran before it.
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
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn, TypeAlias

from tunebook._base.errors import Unsupported, text_of
from tunebook._base.vocabulary import Failure
from tunebook._kernel.output_check import CheckError
from tunebook._measure.stopwatch import Runner, Trial, failed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from tunebook._measure.stopwatch import InProcess

    Found: TypeAlias = Sequence[float] | Failure

_REQUEST: Final = struct.Struct("<qq")  # the candidate, and the number for `sample`: 0 asks for `first`
_LENGTH: Final = struct.Struct("<q")
_TAIL: Final = 2048  # bytes of output, and of a message, that are kept
_TOLD_S: Final = 1.0  # how often a caller is told that it waits
_PARENT_MS: Final = 1000  # how often an idle child looks whether its parent lives
_GLANCE_MS: Final = 50  # how often to look for a death that closed no pipe, because a grandchild holds it open


class Reply(NamedTuple):
    """The reply to one request. `remote` is the child's traceback, or the last 2 kB that it printed."""

    samples_s: tuple[float, ...] = ()
    failure: Failure | None = None
    remote: str = ""


class ChildTask(NamedTuple):
    """The functions that the child calls: both return seconds, or the failure; an exception becomes a failure too."""

    first: Callable[[int], Found]
    sample: Callable[[int, int], Found]


class ForkedWorker(contextlib.AbstractContextManager["ForkedWorker", None]):
    """A child process that runs candidates, and is forked again after it was lost. For one thread at a time.

    The first request forks; leaving the context ends the child. If this process dies, even by SIGKILL, the child dies
    too: at once on Linux, elsewhere within a second after the running candidate returns.
    """

    def __init__(
        self,
        task: ChildTask,
        timeout_s: float = 60.0,
        calm: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
        on_wait: Callable[[], None] = lambda: None,
        *,
        outlives_thread: bool = False,
    ) -> None:
        """`timeout_s` limits each request as a whole. `calm` keeps other threads from holding locks at the fork.

        `on_wait` is called each second while a request is not answered. On Linux the child dies with the thread that
        forks it; with `outlives_thread`, it ends at most a second after its process, or after its last request.
        """
        if getattr(os, "fork", None) is None:
            message = f"candidates cannot be isolated on {sys.platform}, which has no fork. Tune with isolate='never'."
            raise Unsupported(message)
        self._task, self._timeout_s, self._calm, self._on_wait = task, timeout_s, calm, on_wait
        self._outlives_thread: Final = outlives_thread
        self._child: _Child | None = None

    def start(self) -> None:
        """Fork now, and not at the first request."""
        self._fork_if_needed()

    def begin(self, index: int) -> None:
        """Let the child call `first` for a candidate while this process does other work; `prepare` gets the reply."""
        self._fork_if_needed().send(index, 0)

    def prepare(self, index: int) -> Reply:
        """Return the reply of `first` for a candidate."""
        return self.sample(index, 0)

    def sample(self, index: int, number: int) -> Reply:
        """Return the reply of `sample` for a `number` from 1; a child that does not know the candidate prepares it."""
        keep = False
        try:
            child = self._fork_if_needed()
            reply = child.ask(index, number, time.monotonic() + self._timeout_s, self._on_wait)
            # After a MemoryError the child may be full of earlier candidates' leftovers; the next one starts clean.
            keep = reply is not None and (reply.failure is None or reply.failure.kind != "memory")
            if reply is not None:
                return reply
            if child.has_ended():
                failure = exit_failure(child.status, len(child.seen) - 1)
            else:
                failure = Failure(kind="timeout", message=f"no answer within {self._timeout_s:g} s")
            return Reply(failure=failure, remote=child.printed.decode(errors="replace"))
        finally:  # also at Ctrl-C while waiting: the next request must not read the answer to this one
            if not keep:
                self.close()

    def has_answered(self, within_s: float) -> bool:
        """Wait for a moment, and return whether the child has answered the request that was begun, or ended."""
        return self._child is None or self._child.has_answered(within_s)

    def interrupt(self) -> None:
        """Kill the child, while another thread waits for its reply: that thread gets a failure."""
        if self._child is not None:
            self._child.interrupt()

    def _fork_if_needed(self) -> _Child:
        # No candidate is to blame for a death between two requests: on Linux a child dies with its forking thread.
        if self._child is not None and self._child.waits_for is None and self._child.has_ended():
            self.close()
        if self._child is None:
            with self._calm(), _signals_held():
                self._child = _fork(self._task, outlives_thread=self._outlives_thread)
        return self._child

    def close(self) -> None:
        """End the child and all processes in its group. A later request would fork again."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()

    def __exit__(self, *_: object) -> None:
        self.close()


def exit_failure(status: int | None, others: int) -> Failure:
    """Return the failure of a candidate that ended its process; without a `status`, other code reaped the child."""
    many = "1 other candidate" if others == 1 else f"{others} other candidates"
    after = f", in a process that had run {many} before" if others else ""
    if status is None:
        return Failure(kind="crash", message=f"the process is gone; its status was collected elsewhere{after}")
    if status >= 0:
        return Failure(kind="crash", message=f"the process exited with status {status}{after}")
    try:
        name = signal.Signals(-status).name
    except ValueError:  # the real-time signals between SIGRTMIN and SIGRTMAX have no names
        name = f"signal {-status}"
    if -status == signal.SIGKILL:
        # We send SIGKILL too, but only to a late child, and that is reported as a timeout.
        return Failure(kind="memory", message=f"killed by {name}, as the system does when memory runs out{after}")
    return Failure(kind="crash", message=f"killed by {name}{after}")


class Isolated(Runner):
    """Runs candidates in a worker process, which is forked again after a candidate ends it."""

    def __init__(
        self,
        there: InProcess,
        timeout_s: float,
        calm: Callable[[], AbstractContextManager[None]],
        on_wait: Callable[[], None],
    ) -> None:
        """`there` runs them in the child, which has a copy of the arguments. `calm` is entered around each fork."""
        self._there = there

        @contextlib.contextmanager
        def put_back_and_calm() -> Iterator[None]:
            there.put_back()  # a child that was lost has left its marks in shared memory
            with calm():
                yield

        def found(trial: Trial) -> Found:
            return trial.failure or (trial.sample_s, trial.more_s)

        task = ChildTask(lambda index: found(there.first(index)), lambda index, runs: found(there.sample(index, runs)))
        self._worker = ForkedWorker(task, timeout_s, put_back_and_calm, on_wait)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._worker.close()
        self._there.__exit__(kind, error, trace)

    def first(self, index: int) -> Trial:
        return self.sample(index, 0)

    def sample(self, index: int, runs: int) -> Trial:
        samples_s, failure, remote = self._worker.sample(index, runs)
        if failure is not None and failure.kind == "check":
            raise CheckError(failure.message)
        if failure is not None:
            error = RuntimeError(failure.message)
            if remote:
                error.add_note(remote)
            return Trial(failure=failure, error=error)
        seconds, more_s = samples_s
        return Trial(sample_s=seconds, more_s=more_s)


class _Child:
    """The parent's end of a child process: its id, its pipes, and the tail of its output."""

    def __init__(self, pid: int, requests: int, answers: int, output: int) -> None:
        self.seen: set[int] = set()
        self.printed = b""
        self.status: int | None = None
        self.waits_for: tuple[int, int] | None = None  # the request that has been sent, until its answer is here
        self._pid, self._ended = pid, False
        self._requests, self._answers, self._output = requests, answers, output
        self._open = {answers, output}
        for descriptor in self._open:
            os.set_blocking(descriptor, False)

    def send(self, index: int, number: int) -> None:
        """Send a request, unless it was sent before: then the child works on it, or has answered it."""
        if self.waits_for == (index, number):
            return
        self.waits_for = index, number
        self.seen.add(index)
        self.printed = b""
        with contextlib.suppress(BrokenPipeError):  # it is ending; its status will say how
            os.write(self._requests, _REQUEST.pack(index, number))

    def has_answered(self, within_s: float) -> bool:
        """Wait for a moment, and return whether there is an answer to read, or the child has closed its pipe."""
        poll = select.poll()
        poll.register(self._answers, select.POLLIN)
        return bool(poll.poll(within_s * 1e3))

    def ask(self, index: int, number: int, deadline: float, on_wait: Callable[[], None]) -> Reply | None:
        """Return the answer, or None if the child ended or has not answered by the deadline."""
        begun = self.waits_for
        if begun not in (None, (index, number)) and self.ask(*begun, deadline, on_wait) is None:
            return None
        self.send(index, number)
        received, due = b"", time.monotonic() + _TOLD_S
        while (left_s := deadline - (now := time.monotonic())) > 0:
            if now >= due:
                due = now + _TOLD_S
                on_wait()
            ended = self.has_ended()
            received += self._read(left_s, ended=ended)
            if len(received) >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(received)
                if len(received) == _LENGTH.size + length:
                    self.waits_for = None
                    samples_s, failure, remote = json.loads(received[_LENGTH.size :])
                    return Reply(tuple(samples_s), failure and Failure(*failure), remote)
            if ended:
                return None
        return None

    def _read(self, left_s: float, *, ended: bool) -> bytes:
        """Wait for a moment, keep the tail of the output, and return the received part of the answer."""
        # A closed pipe means that the child is ending: its status will be there soon.
        pause_ms = 0 if ended else _GLANCE_MS if self._answers in self._open else 1
        poll = select.poll()
        for descriptor in self._open:
            poll.register(descriptor, select.POLLIN)
        answer = b""
        for descriptor, _ in poll.poll(min(pause_ms, left_s * 1e3)):
            chunk = os.read(descriptor, 1 << 16)  # the size of a pipe on Linux
            if not chunk:
                self._open.discard(descriptor)
            elif descriptor == self._answers:
                answer = chunk
            else:
                self.printed = (self.printed + chunk)[-_TAIL:]
        return answer

    def has_ended(self, options: int = os.WNOHANG) -> bool:
        """Return whether the child has ended, and collect its status."""
        if not self._ended:
            try:
                pid, status = os.waitpid(self._pid, options)
            except ChildProcessError:  # the program ignores SIGCHLD, or waits for any child
                self._ended = True
            else:
                if pid:
                    self._ended, self.status = True, os.waitstatus_to_exitcode(status)
        return self._ended

    def interrupt(self) -> None:
        """Kill the child, and leave the rest to the thread that waits for it."""
        if not self._ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def kill(self) -> None:
        """End the child with its process group, collect it, and close the pipes."""
        # The group first, also after the child has ended: its own children may live. For a group of zombies macOS
        # raises PermissionError.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)
        if not self._ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)  # it may not have had the time to become a group
            self.has_ended(0)
        self._open.clear()
        for descriptor in (self._requests, self._answers, self._output):
            os.close(descriptor)


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Block signals until the parent knows the child: a KeyboardInterrupt would unwind its code in the child too."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _fork(task: ChildTask, *, outlives_thread: bool) -> _Child:
    parent, prctl = os.getpid(), None
    if sys.platform == "linux" and not outlives_thread:
        import ctypes  # noqa: PLC0415 - loaded late: 2 ms; and before the fork, because imports take locks

        prctl = ctypes.CDLL(None).prctl
    (asked, requests), (answers, answered), (output, printed) = os.pipe(), os.pipe(), os.pipe()
    mine, parents = (asked, answered, printed), (requests, answers, output)
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of other threads, and JAX of its own; see the head of this module.
            warnings.simplefilter("ignore")
            pid = os.fork()
    except OSError:  # too many processes
        for descriptor in (*mine, *parents):
            os.close(descriptor)
        raise
    if pid == 0:
        _live(task, parent, prctl, mine, parents)
    for descriptor in mine:
        os.close(descriptor)
    return _Child(pid, *parents)


# ---- The rest of this module runs in the child. ----


def _live(
    task: ChildTask,
    parent: int,
    prctl: Callable[[int, int], int] | None,
    mine: tuple[int, int, int],
    parents: tuple[int, int, int],
) -> NoReturn:
    """Serve requests until the parent is gone. Never returns, and runs none of the parent's exit handlers."""
    try:
        os.setsid()  # a group, to kill it whole; and Ctrl-C in the terminal does not reach it
        if prctl is not None:
            prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, which comes when the forking thread ends
        if os.getppid() != parent:  # it died before it could be watched
            os._exit(0)
        asked, answered, printed = mine
        for descriptor in parents:
            os.close(descriptor)
        _redirect(printed)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        # The parent's garbage is the parent's to collect: its finalizers would remove temporary files still in use.
        gc.freeze()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # or each crash could leave a file as big as the process
        _serve(task, asked, answered, parent)
        os.killpg(0, signal.SIGKILL)  # the parent is gone; processes that candidates started must go too
    finally:
        os._exit(1)


def _redirect(printed: int) -> None:
    """Send the output down a pipe, of which the parent keeps the last 2 kB."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    # The parent's objects may write elsewhere (a notebook, a test runner), hold unwritten text, or be locked.
    sys.stdout = sys.stderr = open(1, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115 - kept
    # It would write to the parent's stderr, or write the parent's stack to ours, over the candidate's last words.
    faulthandler.disable()


def _next_request(asked: int, parent: int) -> bytes:
    """Return the next request; nothing when the parent is gone."""
    poll = select.poll()
    poll.register(asked, select.POLLIN)
    # The pipe alone does not tell: other forks of the parent, which may live on, hold its other end too.
    while not poll.poll(_PARENT_MS):
        if os.getppid() != parent:
            return b""
    return os.read(asked, _REQUEST.size)


def _serve(task: ChildTask, asked: int, answered: int, parent: int) -> None:
    me = os.getpid()
    spare = [bytes(8 << 20)]  # address space, freed to write a traceback when memory has run out
    prepared: set[int] = set()
    while request := _next_request(asked, parent):
        index, number = _REQUEST.unpack(request)
        found: Found = ()
        remote = ""
        try:
            if index not in prepared or not number:
                prepared.add(index)
                found = task.first(index)
            if number and not isinstance(found, Failure):
                found = task.sample(index, number)
        except BaseException as error:  # noqa: BLE001 - a kernel may raise anything; SystemExit must not end the child
            if isinstance(error, MemoryError):
                spare.clear()  # the message takes memory too
            # SystemExit would have ended the program.
            crash = Failure(kind="crash", message=f"{type(error).__name__}: {text_of(error)}")
            found = (failed(error).failure or crash) if isinstance(error, Exception) else crash
            remote = "".join(traceback.format_exception(error))[-_TAIL:]
        if os.getpid() != me:  # the candidate forked, and this is its child: one answer is enough
            os._exit(0)
        failure, samples_s = None, []
        if isinstance(found, Failure):
            prepared.discard(index)
            failure = found._replace(message=found.message[:_TAIL])
        else:
            samples_s = [float(s) for s in found]
        text = json.dumps([samples_s, failure, remote]).encode()
        unsent = memoryview(_LENGTH.pack(len(text)) + text)
        while unsent:
            unsent = unsent[os.write(answered, unsent) :]
