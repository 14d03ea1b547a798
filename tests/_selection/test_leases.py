from __future__ import annotations

import os
import resource
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from lease_processes import outcome
from shared_checks import (
    PLANTED,
    check_that_a_planted_slip_keeps_nobody_waiting,
    check_that_one_thread_makes_the_slip,
)

from tunebook._base.errors import StoreError
from tunebook.stores._files import LeaseFiles


@pytest.fixture
def board(tmp_path):
    return LeaseFiles(tmp_path / "book" / "leases")


def test_a_slip_is_made_once(board):
    assert board.create("k.1", b"mine")
    assert not board.create("k.1", b"yours")
    assert board.read("k.1") == b"mine"


def test_an_absent_board_has_no_slips_and_is_not_made_by_looking(board, tmp_path):
    assert board.generations("k") == []
    assert board.read("k.1") is None
    assert not board.rewrite("k.1", b"x")
    board.remove("k.1")
    assert list(tmp_path.iterdir()) == []


def test_of_32_threads_one_makes_the_slip(board):
    check_that_one_thread_makes_the_slip(board, 32)


def test_directories_and_slips_are_the_users_alone(board, tmp_path):
    board.create("k.1", b"x")
    leases = tmp_path / "book" / "leases"
    modes = {(path.is_dir(), path.stat().st_mode & 0o777) for path in [leases, *leases.rglob("*")]}
    assert modes == {(True, 0o700), (False, 0o600)}


def test_stray_names_are_not_generations(board, tmp_path):
    board.create("k.2", b"x")
    shard = next((tmp_path / "book" / "leases").iterdir())
    for stray in ("k.007", "k.", "k.0", "k.-1", "k.1.tmp", "k.٣", "kk.4", "k", ".k.5"):
        (shard / stray).touch()
    assert board.generations("k") == [2]


@pytest.mark.promise("planted-leases")
@pytest.mark.parametrize("generation", PLANTED)
def test_a_planted_slip_keeps_nobody_waiting(board, tmp_path, generation):
    board.create("k.1", b"x")
    (next((tmp_path / "book" / "leases").iterdir()) / f"k.{generation}").write_bytes(b"x")
    check_that_a_planted_slip_keeps_nobody_waiting(board, "k")


@pytest.mark.parametrize(
    "name", ["../k.1", "a/b.1", "k", "k.", "k.0", "k.01", ".1", "k.1\n", "k\0.1", "x" * 300 + ".1"]
)
def test_a_name_that_could_lead_elsewhere_is_refused(board, name):
    with pytest.raises(StoreError, match="invalid lease name") as caught:
        board.create(name, b"x")
    assert caught.value.kind == "name"


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("nowhere")])
def test_a_lease_that_is_not_a_regular_file_neither_blocks_nor_has_content(board, tmp_path, make):
    board.create("k.1", b"x")
    make(next((tmp_path / "book" / "leases").iterdir()) / "k.2")
    assert board.generations("k") == [1, 2]
    assert not board.read("k.2")


def test_a_file_in_the_way_is_a_store_error_that_names_the_place(tmp_path):
    (tmp_path / "leases").touch()
    with pytest.raises(StoreError, match="Move the file that is in the way") as caught:
        LeaseFiles(tmp_path / "leases", where="the book").create("k.1", b"x")
    assert (caught.value.kind, caught.value.path) == ("not-a-directory", "the book")


def test_a_slip_that_cannot_be_written_whole_is_not_left_behind(board):
    board.create("k.1", b"x")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(StoreError, match="cannot write to"):
            board.create("k.2", b"x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert board.generations("k") == [1]


def test_an_unwritable_board_means_going_on_without_a_lease_after_one_warning():
    with TemporaryDirectory() as root:  # not tmp_path: a test run by root looks at it as another user
        Path(root).chmod(0o555)
        report = outcome("unwritable", root=root)
        Path(root).chmod(0o755)
    assert report["generations"] == [0, 0, 0]
    [warning] = report["warnings"]
    assert "Permission denied" in warning
    assert "other processes may do the same work" in warning


def test_slips_of_other_ids_are_spread_so_that_listing_one_id_stays_cheap(board, tmp_path):
    for number in range(1000):
        board.create(f"op-{number}.1", b"x")
    shards = Counter(path.parent.name for path in (tmp_path / "book" / "leases").rglob("*.1"))
    assert max(shards.values()) < 20  # 4 on average; in one directory it would be 1000


NAMES = st.builds("{}.{}".format, st.sampled_from(["a", "b", "a-1"]), st.integers(1, 12))
CONTENTS = st.binary(max_size=200)


class BoardMachine(RuleBasedStateMachine):
    """A board does what a dict would."""

    def __init__(self):
        super().__init__()
        self.place = TemporaryDirectory()
        self.board = LeaseFiles(Path(self.place.name, "leases"))
        self.model = {}

    @rule(name=NAMES, content=CONTENTS)
    def create(self, name, content):
        assert self.board.create(name, content) == (name not in self.model)
        self.model.setdefault(name, content)

    @rule(name=NAMES, content=CONTENTS)
    def rewrite(self, name, content):
        assert self.board.rewrite(name, content) == (name in self.model)
        if name in self.model:
            self.model[name] = content

    @rule(name=NAMES)
    def remove(self, name):
        self.board.remove(name)
        self.model.pop(name, None)

    @rule(name=NAMES)
    def read(self, name):
        assert self.board.read(name) == self.model.get(name)

    @invariant()
    def lists_what_is_there(self):
        for lease_id in ("a", "b", "a-1"):
            there = sorted(int(name.split(".")[1]) for name in self.model if name.split(".")[0] == lease_id)
            assert self.board.generations(lease_id) == there

    def teardown(self):
        self.place.cleanup()


TestBoardMachine = BoardMachine.TestCase
TestBoardMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
