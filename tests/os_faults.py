"""Lets one system call of a block fail: every call of this thread into the operating system, by its number."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import contextmanager

ERRNOS = [
    errno.EIO, errno.EACCES, errno.ENOSPC, errno.ESTALE, errno.ENOENT, errno.EEXIST, errno.EMFILE, errno.ENOTDIR,
    errno.ELOOP, errno.EROFS, errno.EDQUOT, errno.ENOLCK, errno.ETIMEDOUT, errno.EINVAL, errno.EAGAIN, errno.EISDIR,
    errno.EINTR, errno.ENAMETOOLONG,
]  # fmt: skip
# Functions of `posix` that ask the kernel nothing, or that the kernel never refuses.
NEVER_FAIL = {
    "fspath",
    "getpid",
    "getppid",
    "geteuid",
    "getuid",
    "times",
    "cpu_count",
    "uname",
    "strerror",
    "WIFEXITED",
}


def is_system_call(function):
    """Whether a C function asks the operating system for something that it may refuse."""
    owner = getattr(function, "__self__", None)
    module = getattr(owner, "__name__", "")
    if module in {"posix", "fcntl"}:
        return function.__name__ not in NEVER_FAIL
    return function is io.open or (isinstance(owner, io.IOBase) and function.__name__ in {"read", "readall", "write"})


class SystemCalls:
    """The system calls of a block: how many there were, and where the chosen one was made."""

    def __init__(self):
        self.count = 0
        self.where = ""


@contextmanager
def failing(number, code):
    """Let the system call of a number, from 1, raise `OSError(code)` in this thread; 0 only counts them."""
    seen = SystemCalls()

    def hook(frame, event, function):
        # A profiler sees also the functions that were bound to a name before, which replacing `os.open` would miss.
        if event == "c_call" and is_system_call(function):
            seen.count += 1
            if seen.count == number:
                ours = frame
                while ours is not None and "tunebook" not in ours.f_code.co_filename:
                    ours = ours.f_back
                place = (
                    "" if ours is None else f" at {ours.f_code.co_filename.rpartition('tunebook/')[2]}:{ours.f_lineno}"
                )
                seen.where = f"{function.__name__}{place}"
                raise OSError(code, os.strerror(code))

    before = sys.getprofile()
    sys.setprofile(hook)
    try:
        yield seen
    finally:
        sys.setprofile(before)
