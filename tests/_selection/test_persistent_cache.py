"""PersistentCache: types come back, faults are misses with one warning, bad values are errors at put."""

from __future__ import annotations

import enum
import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pydantic
import pytest

import tunebook as tb
from tunebook import PersistentCache
from tunebook._base.record_format import Record
from tunebook.testing import example_record


class Order(enum.Enum):
    ROW = "row"
    COLUMN = "column"


@dataclass(frozen=True)
class Tile:
    m: int
    n: int = 8


@dataclass(frozen=True)
class Cfg:
    tile: Tile = field(default_factory=lambda: Tile(64))
    grid: tuple[int, ...] = (1, 2)
    order: Order = Order.ROW
    dtype: np.dtype = field(default_factory=lambda: np.dtype("float16"))
    scale: float | None = None
    unroll: bool = False


class Model(pydantic.BaseModel):
    block: tuple[int, int]
    name: str | None = None


class Point(NamedTuple):
    x: int
    y: int


PATHS = ["book", "book.json"]


def book_files():
    return list(Path(os.environ["TUNEBOOK_HOME"]).iterdir())


@pytest.fixture(params=PATHS)
def path(request, tmp_path):
    return tmp_path / request.param


@pytest.mark.parametrize(
    "value",
    [
        Cfg(Tile(1, 2), (3,), Order.COLUMN, np.dtype("int8"), 0.5, unroll=True),
        Model(block=(1, 2)),
        Point(1, 2),
        {"a": (1, True, None, 1.0, "x,y|z")},
        (1, 2),
        5,
        True,
        "text",
        Order.ROW,
    ],
    ids=repr,
)
def test_a_config_comes_back_equal_and_of_its_type_in_a_new_cache(path, value):
    PersistentCache("op", path, cfg_type=type(value)).put("dev", "op", "key", value)
    found = PersistentCache("op", path, cfg_type=type(value)).get("dev", "op", "key")
    assert found == value
    assert type(found) is type(value)


def test_without_a_type_objects_come_back_as_dicts(path):
    cache = PersistentCache("op", path)
    cache.put("d", "o", "k", Tile(3))
    assert cache.get("d", "o", "k") == {"m": 3, "n": 8}


def test_loader_and_dumper_come_first(path):
    cache = PersistentCache("op", path, loader=lambda d: Tile(**d), dumper=lambda t: {"m": t.m * 2, "n": t.n})
    cache.put("d", "o", "k", Tile(3))
    assert cache.get("d", "o", "k") == Tile(6)


@pytest.mark.parametrize(
    "bad", [object(), lambda: 1, {"a": object()}, np.zeros(3)], ids=["object", "lambda", "in", "array"]
)
def test_a_value_that_cannot_be_written_is_an_error_and_spoils_nothing(path, bad):
    cache = PersistentCache("op", path)
    cache.put("d", "o", "before", 1)
    with pytest.raises(tb.CodecError, match="cannot store"):
        cache.put("d", "o", "bad", bad)
    cache.put("d", "o", "after", 2)
    assert [cache.get("d", "o", k) for k in ("before", "bad", "after")] == [1, None, 2]


def test_a_dumper_that_returns_nonsense_is_an_error_at_put(path):
    cache = PersistentCache("op", path, dumper=lambda _: object())
    with pytest.raises(tb.CodecError, match="cannot store"):
        cache.put("d", "o", "k", 1)


@pytest.mark.parametrize("loader", [lambda _: 1 / len([]), lambda d: d["gone"], lambda _: "not a Tile"])
def test_a_loader_that_fails_or_gives_the_wrong_type_is_a_miss_with_one_warning(path, loader):
    PersistentCache("op", path).put("d", "o", "k", Tile(3))
    cache = PersistentCache("op", path, loader=loader, cfg_type=Tile)
    with pytest.warns(tb.TunebookWarning, match="not usable"):
        assert cache.get("d", "o", "k") is None
    assert cache.get("d", "o", "k") is None, "and no second warning, which would be an error here"


def test_an_entry_of_another_type_is_a_miss_with_a_warning(path):
    PersistentCache("op", path).put("d", "o", "k", "text")
    with pytest.warns(tb.TunebookWarning, match="expected a Tile"):
        assert PersistentCache("op", path, cfg_type=Tile).get("d", "o", "k") is None


def test_a_value_of_100_megabytes_is_refused_and_spoils_nothing(path):
    cache = PersistentCache("op", path)
    with pytest.raises(tb.CodecError, match="over the limit"):
        cache.put("d", "o", "k", "x" * 100_000_000)
    cache.put("d", "o", "k", 1)
    assert cache.get("d", "o", "k") == 1


def test_nan_in_a_config_survives(path):
    cache = PersistentCache("op", path)
    cache.put("d", "o", "k", {"x": float("nan")})
    assert str(cache.get("d", "o", "k")) == "{'x': nan}"


@pytest.mark.parametrize(
    "key", [("a|b", "c", "d"), ("a", "b|c", "d"), ("a", "b", "c|d"), ("", "", ""), ("a/..", "/", "\n")]
)
def test_keys_with_separators_do_not_collide(path, key):
    cache = PersistentCache("op", path)
    cache.put("a", "b", "c", "other")
    cache.put(*key, "mine")
    assert (cache.get("a", "b", "c"), cache.get(*key)) == ("other", "mine")


def test_a_file_of_ejkernels_is_read_into_the_type_asked_for(tmp_path):
    path = tmp_path / "flash.json"
    device = "gpu|NVIDIA H200|1"
    path.write_text(json.dumps({f"{device}|flash@v3|deadbeef": {"tile": {"m": 4}, "grid": [7, 8], "order": "row"}}))
    found = PersistentCache("flash", path).get(device, "flash@v3", "deadbeef")
    assert found == {"tile": {"m": 4}, "grid": [7, 8], "order": "row"}

    @dataclass(frozen=True)
    class Old:
        tile: Tile
        grid: tuple[int, ...]
        order: str

    assert PersistentCache("flash", path, cfg_type=Old).get(device, "flash@v3", "deadbeef") == Old(
        Tile(4), (7, 8), "row"
    )


def test_the_default_path_is_the_users_book():
    PersistentCache("op").put("d", "o", "k", 1)
    assert PersistentCache("other").get("d", "o", "k") == 1
    assert [p.name for p in book_files()] == ["v1"]


def test_making_a_cache_touches_no_disk(tmp_path):
    PersistentCache("op")
    PersistentCache("op", tmp_path / "new")
    assert not book_files()
    assert not (tmp_path / "new").exists()


def test_without_a_home_results_stay_in_memory(monkeypatch):
    monkeypatch.delenv("TUNEBOOK_HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pathlib.Path.home", _no_home)
    with pytest.warns(tb.TunebookWarning, match="Set TUNEBOOK_HOME"):
        assert PersistentCache("op").get("d", "o", "k") is None


def _no_home():
    raise RuntimeError("Could not determine home directory.")


def test_a_path_that_cannot_be_a_store_is_an_error_when_the_cache_is_made(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(tb.DefinitionError, match=r"notes\.txt"):
        PersistentCache("op", tmp_path / "notes.txt")


def test_a_record_without_a_decision_is_a_miss_without_a_warning(path):
    cache = PersistentCache("op", path, cfg_type=Tile)
    record = example_record("d", "o", "k", generation=3)
    cache.write(Record(replace(record.head, config=None), record.body))
    assert cache.get("d", "o", "k") is None
    assert cache.read(record.problem) is not None


def test_a_put_counts_though_the_problem_was_tuned_before(path):
    cache = PersistentCache("op", path, cfg_type=Tile)
    record = example_record("d", "o", "k", generation=3)
    for tuned in (record, Record(replace(record.head, config=None), record.body)):
        cache.write(tuned)
        cache.put("d", "o", "k", Tile(5))
        assert cache.get("d", "o", "k") == Tile(5)


# ------------------------------------------------------------------------------------------------- names and arguments


def test_the_settings_of_a_cache_can_be_read(tmp_path):
    cache = PersistentCache("op", tmp_path / "c.json", str, repr, Tile)
    assert (cache.path, cache.loader, cache.dumper, cache.cfg_type) == (str(tmp_path / "c.json"), str, repr, Tile)
    assert (cache.opname, PersistentCache("op").loader) == ("op", None)
    assert PersistentCache("op").path == os.environ["TUNEBOOK_HOME"]


def test_the_settings_of_a_cache_can_be_set(tmp_path):
    cache = PersistentCache("op", tmp_path / "c.json")
    cache.put("d", "o", "k", Tile(4))
    assert cache.get("d", "o", "k") == {"m": 4, "n": 8}
    cache.cfg_type = Tile
    assert cache.get("d", "o", "k") == Tile(4)
    cache.cfg_type, cache.loader = None, sorted
    assert cache.get("d", "o", "k") == ["m", "n"]


@pytest.mark.parametrize("names", [("device", "op_id", "call_key"), ("dev", "op", "key")], ids=str)
def test_long_and_short_names_of_arguments_mean_the_same(tmp_path, names):
    cache = PersistentCache("op", tmp_path)
    where = dict(zip(names, "dok", strict=True))
    cache.put(**where, cfg=3)
    assert cache.get(**where) == cache.get("d", "o", "k") == cache.get("d", "o", **{names[2]: "k"}) == 3


def test_an_unknown_name_of_an_argument_is_an_error(tmp_path):
    with pytest.raises(TypeError, match="operation"):
        PersistentCache("op", tmp_path).get(dev="d", operation="o", key="k")


@pytest.mark.parametrize("place", ["cache.json", "./book", "folder/cache.json"])
@pytest.mark.parametrize("kind", [str, Path])
def test_the_first_argument_may_be_the_path(tmp_path, monkeypatch, place, kind):
    monkeypatch.chdir(tmp_path)
    cache = PersistentCache(kind(tmp_path / place) if kind is Path else place)
    cache.put("gpu:0", "matmul_v1", "key123", {"block": 4})
    assert PersistentCache("matmul", place).get("gpu:0", "matmul_v1", "key123") == {"block": 4}
    assert (tmp_path / place).exists()


def test_loader_and_dumper_may_follow_a_path(tmp_path):
    path = str(tmp_path / "cache.json")
    load, dump = lambda plain: Tile(*plain), lambda tile: [tile.m, tile.n]
    for cache in (PersistentCache(path, load, dump), PersistentCache(path, loader=load, dumper=dump)):
        cache.put("d", "o", "k", Tile(3, 4))
        assert cache.get("d", "o", "k") == Tile(3, 4)
        assert PersistentCache("o", path).get("d", "o", "k") == [3, 4]


@pytest.mark.parametrize("arguments", [("op", repr), ("a/b", repr, repr, repr)], ids=str)
def test_a_function_in_the_place_of_a_path_is_refused(arguments):
    with pytest.raises(tb.DefinitionError, match=r"write PersistentCache\(opname, path"):
        PersistentCache(*arguments)


def test_a_kernel_whose_name_looks_like_a_path_uses_the_users_book():
    @tb.tunable(space=[{"a": 1}], name="a/b.json")
    def f(x, *, config):
        return config.a

    assert f.selector.persistent.path == os.environ["TUNEBOOK_HOME"]
    assert f.selector.persistent.opname == "a/b.json"


# ---------------------------------------------------------------------------------------------------- how it is written


@dataclass(frozen=True)
class Derived:
    block: int
    area: int = field(init=False)
    scratch: list = field(init=False, compare=False, default_factory=list)

    def __post_init__(self):
        object.__setattr__(self, "area", self.block**2)


class Tagged(pydantic.BaseModel):
    m: int

    def model_dump(self, **_):
        return {"from_model_dump": self.m}


class Hexadecimal(pydantic.BaseModel):
    m: int

    @pydantic.field_serializer("m")
    def _hex(self, m):
        return hex(m)

    @pydantic.field_validator("m", mode="before")
    @classmethod
    def _from_hex(cls, m):
        return int(m, 16) if isinstance(m, str) else m


class Area(pydantic.BaseModel):
    m: int

    @pydantic.computed_field
    @property
    def area(self) -> int:
        return self.m**2


class Duck:
    def __init__(self, *numbers):
        self.numbers = numbers

    def model_dump(self):
        return {"numbers": list(self.numbers)}


class Nested(pydantic.BaseModel):
    inner: Model


@pytest.mark.parametrize(("config", "plain"), [
    (Derived(3), {"block": 3, "area": 9}),
    (Tagged(m=1), {"from_model_dump": 1}),
    (Hexadecimal(m=31), {"m": "0x1f"}),
    (Area(m=3), {"m": 3, "area": 9}),
    (Duck(1, 2), {"numbers": [1, 2]}),
    (Nested(inner=Model(block=(1, 2))), {"inner": {"block": (1, 2), "name": None}}),
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_objects_are_written_as_asdict_and_model_dump_say(path, config, plain):
    cache = PersistentCache("op", path)
    cache.put("d", "o", "k", config)
    assert PersistentCache("op", path).get("d", "o", "k") == plain


@pytest.mark.parametrize("config", [Derived(3), Hexadecimal(m=31), Area(m=3), Nested(inner=Model(block=(1, 2)))],
                         ids=lambda value: type(value).__name__)  # fmt: skip
def test_they_come_back_as_objects_of_their_type(path, config):
    PersistentCache("op", path, cfg_type=type(config)).put("d", "o", "k", config)
    assert PersistentCache("op", path, cfg_type=type(config)).get("d", "o", "k") == config


def test_a_computed_field_comes_back_as_it_was(path):
    config = Derived(3)
    object.__setattr__(config, "area", 10)
    cache = PersistentCache("op", path, cfg_type=Derived)
    cache.put("d", "o", "k", config)
    assert cache.get("d", "o", "k").area == 10


def test_an_object_that_its_own_dump_cannot_make_again_is_an_error_at_put(path):
    with pytest.raises(tb.CodecError, match=r"Tagged|m\b"):
        PersistentCache("op", path, cfg_type=Tagged).put("d", "o", "k", Tagged(m=1))


def test_other_tools_files_may_hold_computed_fields(tmp_path):
    (tmp_path / "c.json").write_text(json.dumps({"d|o|k": {"block": 3, "area": 9}}))
    assert PersistentCache("op", tmp_path / "c.json", cfg_type=Derived).get("d", "o", "k") == Derived(3)
