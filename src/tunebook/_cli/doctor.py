"""Check that the book can be read and written and is safe to use, and check everything around it.

Prints quarantined records, packs, leases, the shared book, settings, the C accelerator, and the frameworks and devices
of this machine. Imports no framework. Exits with 1 if something is wrong.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from tunebook._api.versions import installed_version
from tunebook._arrays.device_fingerprint import gpu_driver, host_cpu
from tunebook._base import environment_variables as settings
from tunebook._base.errors import DefinitionError, MissingDependency, StoreError, clean, did_you_mean
from tunebook._cli._filters import Filters, age_text, open_book, size_text
from tunebook._cli._terminal import count_text, wrapped
from tunebook._cli._verb import DONE, NO, ArgumentParser, Namespace, Terminal, Verb
from tunebook._hotpath.codegen import find_pack
from tunebook._selection.env_pins import names_of, parse_pins
from tunebook.stores import DirectoryStore, JsonStore, LayeredStore, PackStore, open_remote, packs_beside
from tunebook.stores._files import FileLock, distrust, fault_of, for_the_command, maker_of, opened, write_file
from tunebook.stores._layered import FOLDER
from tunebook.stores._listing import Catalogue
from tunebook.stores._remote import without_secrets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tunebook.stores import Store

_FRAMEWORKS: Final = ("numpy", "jax", "torch", "triton", "cupy", "numba", "pyopencl")
_LEASE_S: Final = 60.0  # a live holder renews its lease every few seconds
_MARKS: Final = {"good": ("✓", "green"), "note": ("·", "dim"), "warning": ("!", "yellow"), "bad": ("✗", "red bold")}


class Finding(NamedTuple):
    """The result of a check."""

    level: Literal["good", "note", "warning", "bad"]
    what: str
    said: str
    remedy: str = ""


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--full", action="store_true", help="also read every record")


def _run(options: Namespace, terminal: Terminal) -> int:
    findings = list(examine(open_book(options.book), full=options.full))
    if terminal.json:
        terminal.value([finding._asdict() for finding in findings])
    for level, name, *texts in () if terminal.json else findings:
        indent = " " * 15
        room = max(terminal.width - len(indent), 20)
        first, *rest = (line for text in texts if text for line in wrapped(clean(text), room))
        terminal.line(f"{terminal.styled(*_MARKS[level])} {terminal.styled(f'{name:<13}', 'bold')}{first}")
        terminal.lines(indent + line for line in rest)
    return NO if any(finding.level == "bad" for finding in findings) else DONE


def examine(store: Store, *, full: bool) -> Iterator[Finding]:
    """Yield the results of all checks, the most important first."""
    front, *behind = store.layers if isinstance(store, LayeredStore) else (store,)
    if isinstance(front, DirectoryStore):
        yield from _directory(Path(front.where))
    if isinstance(front, (JsonStore, PackStore)):
        with suppress(OSError):  # a missing file, or one that cannot be read: the check of the entries says so
            if (unsafe := distrust(front.where, inside="")) is not None:
                yield Finding("bad", "book", unsafe.message)
    yield from _entries(store, full=full)
    yield from _packs([layer for layer in behind if isinstance(layer, PackStore)])
    if isinstance(front, DirectoryStore):
        yield from _quarantine(Path(front.where, "v1", "quarantine"))
        yield from _leases(Path(front.where, "v1", "leases"))
    yield from _settings(store)
    yield from _shared()
    yield from _machine()


def _directory(root: Path) -> Iterator[Finding]:
    try:
        unsafe = distrust(str(root))
    except FileNotFoundError:
        parent = next(path for path in root.parents if path.exists())
        if os.access(parent, os.W_OK | os.X_OK):
            yield Finding("note", "book", f"{root} does not exist yet; the first tuning creates it")
        else:
            said = f"{root} does not exist, and {parent} is not writable"
            yield Finding("bad", "book", said, "Set TUNEBOOK_HOME to a writable directory.")
    except OSError as error:
        remedy = "Take ownership with chown and chmod u+rwX, or set TUNEBOOK_HOME to another directory."
        yield Finding("bad", "book", f"{root} cannot be read: {error.strerror}", remedy)
    else:
        if unsafe is not None:
            yield Finding("bad", "book", unsafe.message)
            return
        owner = "owned by you" if root.stat().st_uid == os.geteuid() else "owned by root, which is trusted"
        free = shutil.disk_usage(root).free
        yield Finding("good" if free > 100 << 20 else "warning", "book", f"{root}, {owner}; {size_text(free)} free")
        yield _writable(root)
        yield _mount(root)


def _writable(root: Path) -> Finding:
    try:
        _write_in(root)
    except OSError as error:
        said = f"not writable: {error.strerror}. Programs keep their results in memory only."
        return Finding("warning", "writing", said, for_the_command(fault_of(error)[1]))
    return Finding("good", "writing", "works")


def _write_in(root: Path) -> None:
    """Write and remove a file of a book, or raise the `OSError` of programs there; makes no directory."""
    place = root / "v1" / "tmp"
    if place.is_dir():
        trial = place / f"doctor-{os.urandom(8).hex()}"
        write_file(trial, b"", sync=None)
        trial.unlink()
    elif not os.access(root, os.W_OK):
        code = errno.EROFS if os.statvfs(root).f_flag & os.ST_RDONLY else errno.EACCES
        raise OSError(code, os.strerror(code))


def _mount(root: Path) -> Finding:
    try:
        with opened(root) as descriptor, FileLock(descriptor, 1) as is_ours:
            locks = "supports locks" if is_ours else "supports locks (in use right now)"
    except OSError:
        locks = "does not support locks, which the book does not need"
    kept = not os.statvfs(root).f_flag & getattr(os, "ST_NOATIME", 0)
    used = "keeps access times" if kept else "does not keep access times: an entry counts as used when it is written"
    return Finding("good", "mount", f"{locks}; {used}")


def _entries(store: Store, *, full: bool) -> Iterator[Finding]:
    try:
        listed = list(Filters().pick(Catalogue(store)))
    except StoreError as error:
        yield Finding("bad", "entries", str(error))
        return
    size = size_text(sum(entry.size_bytes for entry in listed))
    kernels = len({entry.op for entry in listed})
    yield Finding(
        "good" if listed else "note",
        "entries",
        f"{len(listed):,} of {count_text(kernels, 'kernel', 'kernels')}, {size}",
    )
    if full:
        broken = [entry for entry in listed if entry.record() is None]
        names = ", ".join(entry.id for entry in broken[:3])
        said = f"{len(broken):,} cannot be read: {names}. They count as not tuned." if broken else "all can be read"
        yield Finding("warning" if broken else "good", "records", said)


def _packs(known: Sequence[PackStore]) -> Iterator[Finding]:
    """Yield the packs of the book and of installed packages, then those beside code, which its first call asks."""
    # The first entry of the path is the folder of the command, or the current directory for `python -m tunebook`.
    beside, here = _packs_below(sys.path[1:]), _packs_below(["."])
    packs = {pack.where: pack for pack in (*known, *beside, *here)}
    if not packs:
        said = "none in the book, and none beside code here or on the path of Python"
        yield Finding("note", "packs", f"{said}; a call finds a pack in {FOLDER}/ beside the file of its kernel")
    found = {pack.where for pack in (*known, *beside)}
    for where, pack in packs.items():
        count = sum(1 for _ in pack.heads())
        said = f"{where}: {count_text(count, 'entry', 'entries')}"
        if where in found or not count:
            yield Finding("good" if count else "warning", "pack", said)
        else:
            yield Finding("note", "pack", f"{said}, for programs that import their code from this directory")


def _packs_below(places: Sequence[str]) -> list[PackStore]:
    """Return the packs beside code in some places: of modules, packages, and packages inside these."""
    roots = dict.fromkeys(map(Path.absolute, map(Path, places)))
    found = (folder for root in roots for depth in ("", "*/", "*/*/") for folder in root.glob(f"{depth}{FOLDER}"))
    folders = sorted({folder.parent for folder in found})
    return [pack for folder in folders for pack in packs_beside(str(folder / "code.py"), "")]


def _quarantine(place: Path) -> Iterator[Finding]:
    kept = sorted(place.glob("*"))
    if kept:
        age = age_text(time.time() - kept[-1].stat().st_ctime)
        records = count_text(len(kept), "unreadable record", "unreadable records")
        said = f"{records}, the last moved here {age} ago: {kept[-1].name}"
        yield Finding("warning", "quarantine", said, f"Inspect them, then run: rm {place}/*")
    else:
        yield Finding("good", "quarantine", "empty")


def _leases(place: Path) -> Iterator[Finding]:
    try:
        # Not `glob`, which takes a directory that cannot be listed for an empty one.
        paths = [path for folder in place.iterdir() if folder.is_dir() for path in folder.iterdir()]
    except FileNotFoundError:
        paths = []
    except OSError as error:
        remedy = f"Run ls -ld {place}: tunings need a directory that they can read and write."
        yield Finding("warning", "leases", f"cannot be listed: {error.strerror}", remedy)
        return
    live = stale = 0
    for path in paths:
        with suppress(OSError):  # released since it was listed
            maker, age_s = maker_of(path.read_bytes()), time.time() - path.stat().st_mtime
            is_stale = age_s > _LEASE_S or (maker is not None and maker.is_gone())
            live, stale = live + (not is_stale), stale + is_stale
    said = count_text(live, "tuning in progress", "tunings in progress") if live else "no tuning in progress"
    left = f"; {stale} left by dead processes, which the next tuning takes over" if stale else ""
    yield Finding("note" if stale else "good", "leases", said + left)


def _settings(store: Store) -> Iterator[Finding]:
    checks: dict[str, Callable[[], object]] = {
        "TUNEBOOK_MODE": settings.mode,
        "TUNEBOOK_PIN": lambda: parse_pins(settings.pins_text()),
        "TUNEBOOK_SIGNING_KEY": settings.signing_key,
        "TUNEBOOK_TRUST": settings.trust_setting,
        "TUNEBOOK_LOG": settings.log_setting,
        "TUNEBOOK_RUN": settings.run_options,
    }
    given = settings.settings_given()
    for name, value in given.items():
        try:
            checks.get(name, lambda: None)()
        except DefinitionError as error:
            yield Finding("bad", "setting", str(error))
        else:
            doubt = _doubtful_pins(store) if name == "TUNEBOOK_PIN" else ""
            yield Finding("warning" if doubt else "good", "setting", f"{name}={_shown(name, value)}", doubt)
    unknown = settings.unknown_settings()
    for message in unknown:
        yield Finding("warning", "setting", message)
    if not given and not unknown:
        yield Finding("note", "settings", "no TUNEBOOK_* variable is set")


def _doubtful_pins(store: Store) -> str:
    """Return a warning that names the pinned kernels without an entry; empty if every pinned kernel has one."""
    with suppress(StoreError):  # the check of the entries says so
        ops = sorted({entry.op for entry in Filters().pick(Catalogue(store))})
        known = {name for op in ops for name in names_of(op)}
        unknown = [pin for pin in parse_pins(settings.pins_text()) if pin not in known]
        plain = list(dict.fromkeys(names_of(op)[-1] for op in ops))
        said = "; ".join(did_you_mean("kernel", pin, plain) for pin in unknown if plain)
        return f"{said}. A kernel that has no entry yet may be pinned too." if said else ""
    return ""


def _shown(name: str, value: str) -> str:
    if name == "TUNEBOOK_SIGNING_KEY":
        return value if value.startswith("@") else "(a secret)"
    return without_secrets(value) if name == "TUNEBOOK_REMOTE" else value


def _shared() -> Iterator[Finding]:
    url = settings.remote_url()
    if url is None:
        yield Finding("note", "shared book", "none; set TUNEBOOK_REMOTE to use one")
        return
    started = time.perf_counter()
    try:
        open_remote(url, timeout_s=3.0, key=None).ping()
    except (StoreError, DefinitionError, MissingDependency) as error:
        yield Finding("bad", "shared book", str(error))
    else:
        took = f"answers in {(time.perf_counter() - started) * 1000:.0f} ms"
        yield Finding("good", "shared book", f"{without_secrets(url)} {took}")


def _machine() -> Iterator[Finding]:
    built = find_pack(layout=True) is not None
    why = "in use" if built else "not built" if settings.accelerator_wanted() else "switched off by TUNEBOOK_PURE"
    yield Finding("good" if built else "note", "accelerator", f"C accelerator of the hot path: {why}")
    found = [f"{name} {version}" for name in _FRAMEWORKS if (version := installed_version(name)) is not None]
    yield Finding("good", "frameworks", ", ".join([f"Python {platform.python_version()}", *found]))
    yield Finding("good", "device", host_cpu())
    driver = gpu_driver().get("driver")
    # NVIDIA's driver names its devices here; no framework is needed.
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        text = path.read_text(encoding="utf-8", errors="replace")
        for model in re.findall(r"^Model:\s*(.*?)\s*$", text, re.MULTILINE):
            yield Finding("good", "device", f"gpu:{model}, driver {driver}")


VERB = Verb("tunebook doctor", _run, ("book", "json"), _arguments, __doc__)
