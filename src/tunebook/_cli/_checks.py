"""What `tunebook doctor` looks at, one function each; each yields what it found and, if it is wrong, what to type."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple
from urllib.parse import urlsplit

from tunebook._arrays.device_fingerprint import host_cpu, nvidia_driver
from tunebook._base.environment_variables import (
    SETTINGS,
    accelerator_wanted,
    mode,
    pins_text,
    remote_url,
    settings_given,
    signing_key,
)
from tunebook._base.errors import DefinitionError, MissingDependency, StoreError
from tunebook._cli._environment import installed_version
from tunebook._cli._filters import Filters, age_text, size_text
from tunebook._hotpath.accelerator import find_pack
from tunebook._selection.env_pins import parse_pins
from tunebook._selection.single_flight import maker_of
from tunebook.stores import DirectoryStore, LayeredStore, PackStore, open_remote
from tunebook.stores._files import distrust, drop_lock, opened_directory, take_lock, write_file
from tunebook.stores._listing import Catalogue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tunebook.stores import Store

_FRAMEWORKS: Final = ("numpy", "jax", "torch", "triton", "cupy", "numba", "pyopencl")
_LEASE_S: Final = 60.0  # a live holder changes its slip every few seconds
_LITTLE_BYTES: Final = 100 << 20
_PING_S: Final = 3.0


class Finding(NamedTuple):
    """One thing that was looked at."""

    level: Literal["good", "note", "warning", "bad"]
    what: str
    said: str
    remedy: str = ""


def examine(store: Store, *, full: bool) -> Iterator[Finding]:
    """Yield everything there is to say, most important first."""
    front = store.layers[0] if isinstance(store, LayeredStore) else store
    if isinstance(front, DirectoryStore):
        yield from _directory(Path(front.where))
    yield from _entries(store, full=full)
    yield from _packs(store)
    if isinstance(front, DirectoryStore):
        yield from _quarantine(Path(front.where, "v1", "quarantine"))
        yield from _leases(Path(front.where, "v1", "leases"))
    yield from _settings()
    yield from _shared()
    yield from _machine()


# ------------------------------------------------------------------------------------------------------------ the book


def _directory(root: Path) -> Iterator[Finding]:
    try:
        unsafe = distrust(str(root))
    except FileNotFoundError:
        yield from _missing(root)
        return
    except OSError as error:
        remedy = "Make it yours with chown and chmod u+rwX, or set TUNEBOOK_HOME to another place."
        yield Finding("bad", "book", f"{root} cannot be read: {error.strerror}", remedy)
        return
    if unsafe is not None:
        yield Finding("bad", "book", unsafe.message)
        return
    owner = "yours" if root.stat().st_uid == os.geteuid() else "root's, and so trusted"
    free = shutil.disk_usage(root).free
    level: Literal["good", "warning"] = "good" if free > _LITTLE_BYTES else "warning"
    yield Finding(level, "book", f"{root}, {owner}; {size_text(free)} free")
    yield _writable(root)
    yield _mount(root)


def _missing(root: Path) -> Iterator[Finding]:
    parent = next(path for path in root.parents if path.exists())
    if os.access(parent, os.W_OK | os.X_OK):
        yield Finding("note", "book", f"{root} does not exist yet; the first tuning makes it")
    else:
        remedy = "Set TUNEBOOK_HOME to a directory that you can write to."
        yield Finding("bad", "book", f"{root} does not exist, and {parent} cannot be written to", remedy)


def _writable(root: Path) -> Finding:
    place = root / "v1" / "tmp"
    try:
        if place.is_dir():
            trial = place / f"doctor-{os.urandom(8).hex()}"
            write_file(trial, b"", sync=None)
            trial.unlink()
        elif not os.access(root, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        said = f"cannot be written to: {error.strerror}. Programs keep what they tune in memory only."
        return Finding("warning", "writing", said, f"Make it yours: chmod u+w {root}, or set TUNEBOOK_HOME.")
    return Finding("good", "writing", "works")


def _mount(root: Path) -> Finding:
    try:
        with opened_directory(root) as descriptor:
            locked = take_lock(descriptor, 1)
            if locked:
                drop_lock(descriptor)
        locks = "has locks" if locked else "has locks (taken just now)"
    except OSError:
        locks = "has no locks, which the book can do without"
    flags = os.statvfs(root).f_flag
    kept = not flags & getattr(os, "ST_NOATIME", 0)
    used = "keeps access times" if kept else "keeps no access times, so that unused means not written since"
    return Finding("good", "mount", f"{locks}; {used}")


def _entries(store: Store, *, full: bool) -> Iterator[Finding]:
    try:
        listed = list(Filters().pick(Catalogue(store)))
    except StoreError as error:
        yield Finding("bad", "entries", str(error))
        return
    size = size_text(sum(entry.size_bytes for entry in listed))
    kernels = len({entry.op for entry in listed})
    yield Finding("good" if listed else "note", "entries", f"{len(listed):,} of {kernels:,} kernels, {size}")
    if full:
        broken = [entry for entry in listed if entry.record() is None]
        level: Literal["good", "warning"] = "warning" if broken else "good"
        names = ", ".join(entry.id for entry in broken[:3])
        said = (
            f"{len(broken):,} cannot be read: {names}. Each counts as not tuned yet." if broken else "all can be read"
        )
        yield Finding(level, "records", said)


def _packs(store: Store) -> Iterator[Finding]:
    packs = (
        [layer for layer in store.layers[1:] if isinstance(layer, PackStore)] if isinstance(store, LayeredStore) else []
    )
    if not packs:
        yield Finding("note", "packs", "none in the book, and no installed package announces any")
    for pack in packs:
        count = sum(1 for _ in pack.heads())
        yield Finding("good" if count else "warning", "pack", f"{pack.where}: {count:,} entries")


def _quarantine(place: Path) -> Iterator[Finding]:
    try:
        kept = sorted(place.iterdir())
    except OSError:
        kept = []
    if not kept:
        yield Finding("good", "quarantine", "empty")
        return
    age = age_text(time.time() - kept[-1].stat().st_ctime)
    said = f"{len(kept)} records that could not be read, the last set aside {age} ago: {kept[-1].name}"
    yield Finding("warning", "quarantine", said, f"Look at them, then: rm {place}/*")


def _leases(place: Path) -> Iterator[Finding]:
    live, stale = 0, []
    try:
        slips = list(place.glob("*/*"))
    except OSError as error:
        yield Finding("warning", "leases", f"cannot be looked at: {error.strerror}")
        return
    for path in slips:
        try:
            maker, age_s = maker_of(path.read_bytes()), time.time() - path.stat().st_mtime
        except OSError:
            continue  # released since it was listed
        if age_s > _LEASE_S or (maker is not None and maker.is_gone()):
            stale.append(path)
        else:
            live += 1
    said = f"{live} tunings under way" if live else "nothing is being tuned"
    left = f"; {len(stale)} left by processes that died, which the next tuning takes over" if stale else ""
    yield Finding("note" if stale else "good", "leases", said + left)


# -------------------------------------------------------------------------------------------- settings and the machine


def _settings() -> Iterator[Finding]:
    faults = {}
    for name, check in (
        ("TUNEBOOK_MODE", mode),
        ("TUNEBOOK_PIN", lambda: parse_pins(pins_text())),
        ("TUNEBOOK_SIGNING_KEY", signing_key),
    ):
        try:
            check()
        except DefinitionError as error:
            faults[name] = str(error)
    given = settings_given()
    for setting in SETTINGS:
        if setting.name in faults:
            yield Finding("bad", "setting", faults[setting.name])
        elif setting.name in given:
            yield Finding("good", "setting", f"{setting.name}={_without_secrets(setting.name, given[setting.name])}")
    if not given:
        yield Finding("note", "settings", "none of TUNEBOOK_* is set")


def _without_secrets(name: str, value: str) -> str:
    if name == "TUNEBOOK_SIGNING_KEY":
        return value if value.startswith("@") else "(a secret)"
    if name != "TUNEBOOK_REMOTE":
        return value
    parts = urlsplit(value)
    address = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{address}{parts.path}"


def _shared() -> Iterator[Finding]:
    url = remote_url()
    if url is None:
        yield Finding("note", "shared book", "none; TUNEBOOK_REMOTE names one")
        return
    shown = _without_secrets("TUNEBOOK_REMOTE", url)
    started = time.perf_counter()
    try:
        open_remote(url, timeout_s=_PING_S, key=None).ping()
    except (StoreError, DefinitionError, MissingDependency) as error:
        yield Finding("bad", "shared book", str(error))
        return
    yield Finding("good", "shared book", f"{shown} answers in {(time.perf_counter() - started) * 1000:.0f} ms")


def _machine() -> Iterator[Finding]:
    built = find_pack(layout=True) is not None
    why = "in use" if built else "not built" if accelerator_wanted() else "left out, because TUNEBOOK_PURE is set"
    yield Finding("good" if built else "note", "accelerator", why)
    found = [f"{name} {version}" for name in _FRAMEWORKS if (version := installed_version(name)) is not None]
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    yield Finding("good", "frameworks", ", ".join([python, *found]))
    yield Finding("good", "device", host_cpu())
    driver = nvidia_driver().get("driver")
    for gpu in _gpus():
        yield Finding("good", "device", f"{gpu}, driver {driver}")


def _gpus() -> Iterator[str]:
    """Yield the names that NVIDIA's driver gives its devices, without asking a framework."""
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name == "Model":
                yield f"gpu:{value.strip()}"
