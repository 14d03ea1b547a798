"""Settings from the environment: their table, and the only module that reads `os.environ`.

Every function reads the environment anew, so that a test or a launcher can change a setting. The hot path reads none:
`os.environ` tells when a setting that answers depend on has changed, and the memoised answers are forgotten.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, get_args

from tunebook._base.errors import DefinitionError, did_you_mean, not_among, warn_once
from tunebook._base.vocabulary import Trust

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Mode = Literal["normal", "frozen", "replay", "off"]


class Setting(NamedTuple):
    name: str
    values: str
    default: str
    meaning: str


SETTINGS: Final = (
    Setting("TUNEBOOK_HOME", "a directory", "tunebook in the user's cache directory", "where the book is"),
    Setting(
        "TUNEBOOK_MODE",
        "normal, frozen, replay or off",
        "normal",
        "frozen tunes nothing and writes nothing to the book; replay also makes a call that the book does not know an "
        "error; off neither tunes nor looks into the book",
    ),
    Setting(
        "TUNEBOOK_PIN",
        "kernel:name=value,name=value; kernel:...",
        "nothing pinned",
        "gives every call of a kernel one configuration, for a comparison; it is never stored",
    ),
    Setting(
        "TUNEBOOK_REMOTE",
        "redis://, rediss://, s3://, gs:// or az:// and the rest of an address",
        "no shared book",
        "a book that many machines share, asked after a local miss",
    ),
    Setting(
        "TUNEBOOK_SIGNING_KEY",
        "a secret, or @ and the path of a file that holds it",
        "records are not signed",
        "signs records for the shared book and bundles, and refuses records without a valid signature",
    ),
    Setting(
        "TUNEBOOK_TRUST",
        "exact, versions, candidates, code, family, near or any",
        "family in the modes frozen and replay, else exact",
        "how far an entry of the book may be from the call that it answers",
    ),
    Setting(
        "TUNEBOOK_LOG",
        "info or debug",
        "nothing is printed",
        "prints to standard error when a tuning begins and ends; debug prints each candidate and each answer too",
    ),
    Setting("TUNEBOOK_PURE", "1 or 0", "0", "1 leaves the compiled accelerator out"),
    Setting(
        "TUNEBOOK_LOCKS",
        "a directory",
        "tunebook- and the user's number in /tmp",
        "where processes that measure on one device wait for each other; containers need the same directory",
    ),
    Setting("TUNEBOOK_RECORD", "1 or 0", "0", "1 notes every call of an `Executor`, for `get_invocations`"),
    Setting(
        "TUNEBOOK_RUN",
        "JSON, written by `tunebook run`",
        "not under `tunebook run`",
        "options of `tunebook run` for the processes of its command, and where they report",
    ),
)
HOME_VARIABLE: Final = SETTINGS[0].name


class RunOptions(NamedTuple):
    """The options of `tunebook run` for each process of its command; processes report in `folder`.

    Kernels of these `packages` are taken over, or of all if it is None; an empty tuple takes over nothing.
    """

    folder: str
    packages: tuple[str, ...] | None = None
    budget: str | None = None
    record: bool = False
    live: bool = False


_ANSWERS_DEPEND_ON: Final = ("TUNEBOOK_MODE", "TUNEBOOK_PIN", "TUNEBOOK_TRUST")
_listeners: Final[list[Callable[[], object]]] = []


def on_new_setting(listener: Callable[[], object]) -> None:
    """Call a function whenever a program changes a setting that answers depend on."""
    _listeners.append(listener)


class _WatchedEnvironment(type(os.environ)):  # type: ignore[misc] # its class has no public name
    """`os.environ`, which tells of its changes: a warm call would have to read it, for half of its own time."""

    def __setitem__(self, name: str, value: str) -> None:
        super().__setitem__(name, value)
        _tell_of(name)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        _tell_of(name)


def _tell_of(name: str) -> None:
    if name in _ANSWERS_DEPEND_ON:
        tell_of_new_setting()


def tell_of_new_setting() -> None:
    """Call the functions that `on_new_setting` has been given."""
    for listener in _listeners:
        listener()


os.environ.__class__ = _WatchedEnvironment


def accelerator_wanted() -> bool:
    """Return whether compiled code may be used: `TUNEBOOK_PURE` is empty or "0"."""
    return os.environ.get("TUNEBOOK_PURE", "") in ("", "0")


def recording_wanted() -> bool:
    """Return whether an `Executor` notes its calls: `TUNEBOOK_RECORD`, or `EJKERNEL_OPS_RECORD`, is "1"."""
    return "1" in (os.environ.get("TUNEBOOK_RECORD"), os.environ.get("EJKERNEL_OPS_RECORD"))


def run_options() -> RunOptions | None:
    """Return the options of the `tunebook run` that this process belongs to, or None."""
    given = os.environ.get("TUNEBOOK_RUN")
    if not given:
        return None
    try:
        folder, packages, budget, record, live = json.loads(given)
    except (TypeError, ValueError) as error:
        raise DefinitionError(f"invalid TUNEBOOK_RUN={given!r}; only `tunebook run` sets it: unset it") from error
    return RunOptions(folder, None if packages is None else tuple(packages), budget, record, live)


def settings_under(
    options: RunOptions, startup: str, *, mode: Mode | None, home: str | None = None, trust: Trust | None = None
) -> dict[str, str]:
    """Return the variables of a command whose Python processes run `sitecustomize.py` of the folder `startup`."""
    # An empty part of PYTHONPATH would be the working directory.
    places = os.pathsep.join(filter(None, [startup, os.environ.get("PYTHONPATH")]))
    given = {"TUNEBOOK_MODE": mode, HOME_VARIABLE: home, "TUNEBOOK_TRUST": trust}
    given |= {"PYTHONPATH": places, "TUNEBOOK_RUN": json.dumps(options)}
    return {name: value for name, value in given.items() if value is not None}


def environment_with(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a new process: the variables of this process, and these."""
    return {**os.environ, **settings}


def stamp_form() -> str | None:
    """Return the form of the labels that an `Executor` puts into compiled programs: "hash", "json" or None."""
    form = os.environ.get("EJKERNEL_OPS_STAMP", "none").lower()
    return form if form in ("hash", "json") else None


def mode() -> Mode:
    """Return the mode: how the process may use its book."""
    asked = os.environ.get("TUNEBOOK_MODE") or "normal"
    if asked not in get_args(Mode):
        raise DefinitionError(not_among("TUNEBOOK_MODE", asked, get_args(Mode)))
    return asked  # type: ignore[return-value] # one of the literals


def trust_setting() -> Trust | None:
    """Return how far an entry may be from the call that it answers, if the environment says so."""
    asked = os.environ.get("TUNEBOOK_TRUST") or None
    if asked not in (None, *get_args(Trust)):
        raise DefinitionError(not_among("TUNEBOOK_TRUST", asked, get_args(Trust)))
    return asked  # type: ignore[return-value] # one of the literals


def log_setting() -> Literal["info", "debug"] | None:
    """Return the level of the lines that `TUNEBOOK_LOG` asks for."""
    asked = (os.environ.get("TUNEBOOK_LOG") or "").lower()
    if asked not in ("", "info", "debug"):
        raise DefinitionError(f"invalid TUNEBOOK_LOG={asked!r}; use info or debug")
    return asked or None  # type: ignore[return-value] # one of the literals


def pins_text() -> str:
    return os.environ.get("TUNEBOOK_PIN", "")


def remote_url() -> str | None:
    """Return the address of the shared book, or None."""
    return os.environ.get("TUNEBOOK_REMOTE") or None


def signing_key() -> bytes | None:
    """Return the secret for signing records and bundles, or None; an unreadable file is an error."""
    given = os.environ.get("TUNEBOOK_SIGNING_KEY")
    if not given:
        return None
    if not given.startswith("@"):
        return given.encode()
    try:
        key = Path(given[1:]).expanduser().read_bytes().strip()
    except OSError as error:
        raise DefinitionError(f"TUNEBOOK_SIGNING_KEY={given!r}: the file cannot be read: {error}") from error
    if not key:
        raise DefinitionError(f"TUNEBOOK_SIGNING_KEY={given!r}: the file is empty; write a secret into it")
    return key


def lock_root() -> Path:
    """Return the directory on this host in which processes of this user lock devices; it need not exist."""
    # Not $TMPDIR and not $XDG_RUNTIME_DIR: they differ between a service, a batch job and a login of the same user,
    # which would not see each other.
    return Path(os.environ.get("TUNEBOOK_LOCKS") or f"/tmp/tunebook-{os.geteuid()}")  # noqa: S108 - checked when opened


def visible_gpus() -> list[str] | None:
    """Return the names in `CUDA_VISIBLE_DEVICES`; None if this process may use all GPUs."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if given is None else [name.strip() for name in given.split(",") if name.strip()]


def show_gpu(name: str) -> None:
    """Let this process, which has not used a GPU yet, see this GPU only; an empty name hides all."""
    os.environ["CUDA_VISIBLE_DEVICES"] = name


def colour_refused() -> bool:
    """Return whether a terminal gets no colour: `NO_COLOR` is set (https://no-color.org), or `TERM` is dumb."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


def settings_given() -> dict[str, str]:
    """Return the settings that are set, as text."""
    return {setting.name: os.environ[setting.name] for setting in SETTINGS if os.environ.get(setting.name)}


def unknown_settings() -> list[str]:
    """Return a message about each variable that begins as settings do, but is unknown."""
    known = [setting.name for setting in SETTINGS]
    unknown = sorted(name for name in os.environ if name.startswith("TUNEBOOK_") and name not in known)
    return [did_you_mean("variable", name, known) for name in unknown]


def warn_of_unknown_settings() -> None:
    """Warn once about each variable that `unknown_settings` finds: its setting would be missing in silence."""
    for message in unknown_settings():
        warn_once("unknown-setting", message, message)


def check_settings() -> None:
    """Raise `DefinitionError` for an invalid mode or trust, and warn about unknown variables."""
    mode()
    trust_setting()
    warn_of_unknown_settings()


def book_root() -> Path | None:
    """Return the directory of the user's book, which need not exist; None where the user has no home."""
    home = os.environ.get(HOME_VARIABLE)
    cache = os.environ.get("XDG_CACHE_HOME")
    if not home and cache and Path(cache).is_absolute():  # the XDG specification says to ignore a relative one
        return Path(cache) / "tunebook"
    try:
        return Path(home).expanduser() if home else Path.home() / ".cache" / "tunebook"
    except RuntimeError:
        return None  # containers run accounts that have neither $HOME nor a line in the password file


def no_home() -> str:
    """Return why the user's book has no directory, where `book_root` returns None."""
    given = os.environ.get(HOME_VARIABLE)
    return f"{HOME_VARIABLE}={given!r} names a user without a home directory" if given else "no home directory"
