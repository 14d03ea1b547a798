"""Configurations that people write: names and values are checked against the space, and parts are completed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from tunebook._base.errors import DefinitionError, did_you_mean, warn_once
from tunebook._memo.answer_memo import BoundedDict
from tunebook._space.space import Config, Space

if TYPE_CHECKING:
    from collections.abc import Callable

_NOT_TOGETHER: Final = "no candidate has these values together"
_WALKED: Final = 10_000  # combinations to look for a candidate in, at most: 30 ms
_REMEMBERED: Final = 256  # checked configurations: a program that passes `config=` in a loop writes a few


def as_config(value: object) -> Any:
    """Return a plain dict as a `Config`, and an instance of the author's own class unchanged."""
    return Config(**value) if type(value) is dict else value


class WrittenConfigs:
    """Checks `config=`, `overlay(...)` and `heuristic=` of a kernel against its space, or its list of configurations.

    Nothing is known about the names of a space that is a function of the arguments, or of a list of other objects:
    there, every configuration is taken as it is.
    """

    def __init__(self, op_id: str, space: object) -> None:
        self._op_id = op_id
        self._space = space if isinstance(space, Space) else None
        self._listed: tuple[Config, ...] = ()
        if isinstance(space, tuple) and all(isinstance(config, Config) for config in space):
            self._listed = space
        forms = [tuple(space.axes)] if isinstance(space, Space) else [tuple(config) for config in self._listed]
        self._forms: Final = {frozenset(names): names for names in forms}
        self._names: Final = tuple(dict.fromkeys(name for names in forms for name in names))
        self._checked: BoundedDict[Config, Config] = BoundedDict(_REMEMBERED)
        self._is_empty_list = space == ()
        self.outside = ""  # how the heuristic's last configuration is outside of the space
        self._free: BoundedDict[Config, Config] = BoundedDict(_REMEMBERED)  # with values that need not be in the space

    def check_heuristic(self, given: Any) -> Any:
        """Return the heuristic's configuration; it must have every name of the space.

        Values outside of the space are a mistake in a dict, and meant in a `Config`, as in `config=` of a call.
        """
        config = as_config(given)
        if not self._forms or frozenset(self._names_in("heuristic", config)) in self._forms:
            self.outside = self._told_of(config, free=given is config)
            if self.outside and given is not config:
                self._check_hashable("heuristic", config)
            return config
        raise DefinitionError(f"{self._op_id!r}: heuristic={_text(config)}: {self._missing(config)}")

    def tell_of_heuristic(self, config: Any) -> Any:
        """Return the heuristic's configuration; warn once if it is not in the space, as `config=` would say."""
        if self.outside:
            warn_once("heuristic", self._op_id, f"{self._op_id!r}: {self.outside}")
        return config

    def _told_of(self, config: Any, *, free: bool) -> str:
        """Return the warning about a heuristic's configuration; empty if it is in the space, or may be outside."""
        if self._is_empty_list:
            return f"the space is empty, so every call runs with heuristic={_text(config)}. Give it candidates"
        outside = "" if free else self._why_outside(config)
        if outside and self._space is not None and self._space.size <= _WALKED and not self._space:
            left_out = f"`where` leaves out all {self._space.size} combinations of the space"
            return f"{left_out}, so every call runs with heuristic={_text(config)}. Fix the constraints"
        return outside and (
            f"heuristic={_text(config)}: {outside}. It is used all the same: it answers until a call is tuned, and "
            "then races with the candidates. Add it to the space, or fix the heuristic"
        )

    def check_names(self, given: str, config: Any) -> None:
        """Raise `DefinitionError` if a configuration has a name that the space does not have."""
        if self._forms:
            self._names_in(given, config)

    def whole(self, given: str, config: Any, heuristic: Callable[[], Any]) -> Any:
        """Return a configuration with every name: the rest of a part comes from the heuristic's.

        The values of a dict must be values of the space. A `Config` is taken with the values that it has.
        """
        if not self._forms or not isinstance(config, (dict, Config)):
            self.check_names(given, config)
            return config
        own, checked = (config, self._free) if isinstance(config, Config) else (Config(**config), self._checked)
        self._check_hashable(given, own)
        found = checked.get(own)
        return found if found is not None else self._whole(given, own, heuristic, free=isinstance(config, Config))

    def _check_hashable(self, given: str, config: Config) -> None:
        try:
            hash(config)
        except TypeError as error:
            raise DefinitionError(f"{self._op_id!r}: {given}={_text(config)}: {error}; write a tuple") from None

    def _whole(self, given: str, config: Config, heuristic: Callable[[], Any], *, free: bool) -> Config:
        names = frozenset(self._names_in(given, config))
        if not free:
            for name in config:
                self._check_value(given, name, config[name])
        if names in self._forms:
            checked, member = (self._free, config) if free else (self._checked, self._member(given, config))
            checked[config] = member
            return member
        base = heuristic()
        if isinstance(base, Config) and frozenset(base) | names in self._forms:
            merged = Config(**{name: config.get(name, base[name]) for name in base} | dict(config))
            # The heuristic's own values need not be in the space.
            return merged if free or not self._has_values(base) else self._member(given, merged)
        found = f"{given}={_text(config)}: {self._missing(config)}"
        raise DefinitionError(f"{self._op_id!r}: {found}, and there is no heuristic= to take the rest from")

    def _names_in(self, given: str, config: Any) -> tuple[str, ...]:
        """Return the names of a configuration; `DefinitionError` for a name that no candidate has."""
        if not isinstance(config, Mapping):
            if any(all(hasattr(config, name) for name in form) for form in self._forms):
                return next(names for form, names in self._forms.items() if all(hasattr(config, n) for n in form))
            form = ", ".join(f"{name!r}: ..." for name in next(iter(self._forms.values())))
            raise DefinitionError(f"{self._op_id!r}: {given}={config!r} is not a configuration; write {{{form}}}")
        for name in config:
            if name not in self._names:
                raise DefinitionError(
                    f"{self._op_id!r}: {given}={_text(config)}: {did_you_mean('axis', name, self._names)}"
                )
        return tuple(config)

    def _missing(self, config: Mapping[str, Any]) -> str:
        absent = [name for name in self._names if name not in config] or list(self._names)
        return f"{', '.join(absent)} {'is' if len(absent) == 1 else 'are'} missing"

    def _values(self, name: str) -> list[Any]:
        if self._space is not None:
            return list(self._space.axes[name])
        return list(dict.fromkeys(config[name] for config in self._listed if name in config))

    def _has_values(self, config: Config) -> bool:
        return all(self._has_value(config, name) for name in config)

    def _has_value(self, config: Config, name: str) -> bool:
        return config[name] in self._values(name)

    def _why_outside(self, config: Any) -> str:
        """Return why a configuration, with names of the space, is not in it; empty if it is, or may be."""
        if not self._forms or not isinstance(config, Config):
            return ""
        for name in config:
            if not self._has_value(config, name):
                return self._reason_against(name, config[name])
        if self._space is None:
            return "" if config in self._listed else _NOT_TOGETHER
        try:
            self._space.config(**config)
        except DefinitionError as error:
            return str(error)
        return ""

    def _check_value(self, given: str, name: str, value: Any) -> None:
        if not any(type(own) is type(value) and own == value for own in self._values(name)):
            raise DefinitionError(
                f"{self._op_id!r}: {given}: {self._reason_against(name, value)}. To try a value outside of the space, "
                "pass a tunebook.Config"
            )

    def _reason_against(self, name: str, value: Any) -> str:
        """Return which values an axis has, and which of them is near to a value that it does not have."""
        values = self._values(name)
        if self._space is not None and not isinstance(value, str):
            values = [own for own in values if own == value] or values
        texts = [own for own in values if isinstance(own, str)]
        near = did_you_mean("value", value, texts) if isinstance(value, str) and texts else ""
        has = f"it has {', '.join(map(repr, values[:8]))}{', ...' if len(values) > 8 else ''}"
        return f"{name}={value!r} is not in the space; {near or has}"

    def _member(self, given: str, config: Config) -> Config:
        """Return the candidate that is equal to a configuration whose values are all in the space."""
        if self._space is None:
            found = next((each for each in self._listed if each == config), None)
            if found is None:
                raise DefinitionError(f"{self._op_id!r}: {given}={_text(config)}: {_NOT_TOGETHER}")
            return found
        try:
            return self._space.config(**config)
        except DefinitionError as error:
            raise DefinitionError(f"{self._op_id!r}: {given}: {error}") from None


def _text(config: Any) -> str:
    return repr(dict(config)) if isinstance(config, Mapping) else repr(config)
