"""The directory of records, fault by fault."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import HANG_S
from mounts import needs_mounts
from store_stress.rounds import (
    command,
    environment,
    lost_by_kills,
    lost_by_writers,
    read_while_hammered,
)

from tunebook._base.errors import StoreError, TunebookWarning, forget_warnings
from tunebook._base.record_format import MAX_RECORD_BYTES
from tunebook._base.vocabulary import Problem
from tunebook.stores import DirectoryStore, open_store, problem_id
from tunebook.stores._files import RESERVED, path_component
from tunebook.testing import AWKWARD_NAMES, example_record


@pytest.fixture
def root(tmp_path):
    return tmp_path / "book"


def file_of(root):
    """The one record file of a book."""
    (path,) = (path for path in (root / "v1").glob("*/*/*.json") if path.parts[-3] not in RESERVED)
    return path


def quarantined(root):
    return sorted((root / "v1" / "quarantine").glob("*"))


# What a record looks like on disk


@given(st.text())
def test_any_name_becomes_one_safe_path_component(name):
    component = path_component(name)
    assert component not in {".", "..", *RESERVED}
    assert set(component) <= set("abcdefghijklmnopqrstuvwxyz0123456789._-")
    assert 0 < len(component) <= 64
    assert component[0] not in ".-"


def test_names_that_differ_have_components_that_differ_beyond_case():
    components = [path_component(name).lower() for name in AWKWARD_NAMES]
    assert len(set(components)) == len(AWKWARD_NAMES)


def test_a_harmless_name_is_its_own_component():
    assert path_component("nvidia-h200_sm90.1") == "nvidia-h200_sm90.1"
    assert path_component("NVIDIA H200").startswith("nvidia-h200-")


@given(st.tuples(st.text(), st.text(), st.text()), st.tuples(st.text(), st.text(), st.text()))
def test_two_problems_have_two_ids(one, other):
    assert (problem_id(Problem(*one)) == problem_id(Problem(*other))) == (one == other)


def test_a_record_is_one_file_under_its_device_and_operation(root):
    record = example_record(device="cpu-x", op="matmul")
    DirectoryStore(root).put(record)
    path = root / "v1" / "cpu-x" / "matmul" / f"{problem_id(record.problem)}.json"
    assert path.read_bytes() == record.to_bytes()


def test_opening_and_reading_make_nothing(root):
    store = DirectoryStore(root)
    assert store.get(example_record().problem) is None
    assert list(store.items()) == []
    assert store.delete(example_record().problem) is False
    assert not root.exists()


def test_a_store_of_a_newer_major_is_not_touched(root):
    (root / "v2").mkdir(parents=True)
    (root / "v2" / "anything.json").write_text("of tomorrow")
    store = DirectoryStore(root)
    store.put(example_record())
    assert store.delete(example_record().problem)
    assert list(store.items()) == []
    assert [path.name for path in (root / "v2").iterdir()] == ["anything.json"]


def test_a_put_leaves_no_temporary_file(root):
    store = DirectoryStore(root)
    store.put(example_record(generation=1))
    store.put(example_record(generation=0))  # fenced off
    assert list((root / "v1" / "tmp").iterdir()) == []


def test_old_temporary_files_are_cleaned_at_the_first_write(root):
    temps = root / "v1" / "tmp"
    temps.mkdir(parents=True)
    for name, age_s in {"dead": 3700, "alive": 60}.items():
        (temps / name).touch()
        os.utime(temps / name, (os.stat(temps).st_mtime - age_s,) * 2)  # noqa: PTH116 - one call
    DirectoryStore(root).put(example_record())
    assert [path.name for path in temps.iterdir()] == ["alive"]


# Durability


class Syncs:
    """Counts the synced files, in place of `os.fsync`; `order` also notes files that had their name already."""

    def __init__(self):
        self.order = []

    def one(self, descriptor):
        os.fsync(descriptor)
        self.order.append(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115 - one call

    def all(self, descriptor):
        self.order.append("file system")
        return True


def test_a_put_takes_two_syncs_first_the_content_then_the_name(root):
    syncs = Syncs()
    store = DirectoryStore(root, sync=syncs.one)
    store.put(example_record(call_key="the first makes directories"))
    syncs.order.clear()
    store.put(example_record())
    content, name = syncs.order
    assert Path(content).parent == root / "v1" / "tmp"
    assert Path(name) == root / "v1" / "cpu" / path_component("matmul@1")


def test_new_directories_are_synced_once(root):
    syncs = Syncs()
    store = DirectoryStore(root, sync=syncs.one)
    store.put(example_record(op="a"))
    made = syncs.order.count(str(root / "v1"))
    assert made == 2  # for tmp/ and for cpu/
    store.put(example_record(op="b"))
    assert syncs.order.count(str(root / "v1")) == made
    assert str(root.parent) in syncs.order


def test_put_many_shares_its_syncs(root):
    syncs = Syncs()
    store = DirectoryStore(root, sync=syncs.one, sync_all=syncs.all)
    store.put(example_record(call_key="the first makes directories"))
    syncs.order.clear()
    store.put_many(example_record(call_key=str(n)) for n in range(500))
    assert syncs.order == ["file system", str(root / "v1" / "cpu" / path_component("matmul@1"))]


def test_put_many_syncs_every_file_where_the_system_cannot_sync_all(root):
    syncs = Syncs()
    store = DirectoryStore(root, sync=syncs.one, sync_all=lambda _: False)
    store.put(example_record(call_key="the first makes directories"))
    syncs.order.clear()
    store.put_many(example_record(call_key=str(n)) for n in range(50))
    assert len(syncs.order) == 51


def test_a_failing_sync_is_an_error_and_keeps_the_old_record(root):
    DirectoryStore(root).put(example_record(config="old"))

    def fail(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(StoreError, match="Input/output error") as caught:
        DirectoryStore(root, sync=fail).put(example_record(config="new"))
    assert caught.value.kind == "io"
    assert DirectoryStore(root).get(example_record().problem) == example_record(config="old")
    assert list((root / "v1" / "tmp").iterdir()) == []


@pytest.mark.parametrize("name", ["book", "book.json"])
def test_eight_processes_that_write_together_lose_nothing(tmp_path, name):
    assert lost_by_writers(tmp_path / name, processes=8, count=50) == 0


@pytest.mark.promise("kill-9")
@pytest.mark.parametrize("name", ["book", "book.json"])
def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path, name):
    acknowledged, lost = lost_by_kills(tmp_path / name, rounds=10)
    assert acknowledged >= 10
    assert lost == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["book", "book.json"])
def test_fifty_times_kill_9_loses_nothing_that_was_acknowledged(tmp_path, name):
    acknowledged, lost = lost_by_kills(tmp_path / name, rounds=50, seed=1)
    assert acknowledged >= 50
    assert lost == 0


@pytest.mark.parametrize("name", ["book", "book.json"])
def test_a_reader_sees_only_whole_records_while_four_processes_write(tmp_path, name):
    _, wrong = read_while_hammered(tmp_path / name, reads=500)
    assert wrong == 0


def test_a_lower_generation_never_wins_among_threads(root):
    store = DirectoryStore(root)
    for round_number in range(20):
        records = [example_record(call_key=str(round_number), config=g, generation=g) for g in range(6)]
        threads = [threading.Thread(target=store.put, args=(record,)) for record in records]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.get(records[0].problem) == records[-1]


# Records that cannot be read


def _truncate(path):
    path.write_bytes(path.read_bytes()[:-20])


def _be_a_directory(path):
    path.unlink()
    path.mkdir()


def _be_a_pipe(path):
    path.unlink()
    os.mkfifo(path)


def _be_huge(path):
    with path.open("wb") as file:
        file.truncate(100 << 20)


DAMAGES = {
    "truncated": _truncate,
    "empty": lambda path: path.write_bytes(b""),
    "not an object": lambda path: path.write_text("[1, 2]"),
    "foreign": lambda path: path.write_text('{"cpu|matmul|k": {"block": 1}}'),
    "binary": lambda path: path.write_bytes(bytes(range(256))),
    "two records": lambda path: path.write_bytes(path.read_bytes() * 2),
    "another problem's": lambda path: path.write_bytes(example_record(call_key="another").to_bytes()),
    "over the limit": lambda path: path.write_bytes(b" " * (MAX_RECORD_BYTES + 1)),
    "huge": _be_huge,
    "a directory": _be_a_directory,
    "a pipe": _be_a_pipe,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_an_unreadable_record_is_a_miss_and_one_warning_and_goes_to_quarantine(root, damage):
    store = DirectoryStore(root)
    store.put(example_record())
    path = file_of(root)
    damage(path)
    with pytest.warns(TunebookWarning, match="unreadable record .* counts as not tuned yet") as caught:
        found = [store.get(example_record().problem) for _ in range(2)]
    assert found == [None, None]
    assert len(caught) == 1
    assert len(quarantined(root)) == 1
    assert not path.exists()
    store.put(example_record())
    assert store.get(example_record().problem) == example_record()


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_put_over_an_unreadable_record_succeeds_and_keeps_the_remains(root, damage):
    store = DirectoryStore(root)
    store.put(example_record(config="old"))
    damage(file_of(root))
    with pytest.warns(TunebookWarning, match="unreadable record"):
        store.put(example_record(config="new"))
    assert store.get(example_record().problem) == example_record(config="new")
    assert len(quarantined(root)) == 1


def test_items_skips_unreadable_records_and_records_in_the_wrong_place(root):
    store = DirectoryStore(root)
    store.put(example_record())
    good = file_of(root)
    (good.parent / f"{'0' * 32}.json").write_bytes(good.read_bytes())
    (good.parent / "notes.txt").write_text("not a record")
    (good.parent.parent / "README").write_text("not a directory")
    with pytest.warns(TunebookWarning, match="belongs elsewhere"):
        assert list(store.items()) == [example_record()]
    assert len(quarantined(root)) == 1


def test_many_unreadable_records_are_one_warning(root):
    store = DirectoryStore(root)
    records = [example_record(call_key=str(n)) for n in range(30)]
    store.put_many(records)
    for path in (root / "v1" / "cpu").glob("*/*.json"):
        path.write_text("damaged")
    with pytest.warns(TunebookWarning) as caught:
        assert [store.get(record.problem) for record in records] == [None] * 30
    assert len(caught) == 1


def test_the_quarantine_is_bounded_and_keeps_the_newest(root):
    now = iter(range(1_000, 100_000))
    store = DirectoryStore(root, now=lambda: next(now))
    records = [example_record(call_key=str(n)) for n in range(300)]
    store.put_many(records)
    for path in (root / "v1" / "cpu").glob("*/*.json"):
        path.write_text("damaged")
    with pytest.warns(TunebookWarning, match="unreadable"):
        assert [store.get(record.problem) for record in records] == [None] * 300
    names = [path.name for path in quarantined(root)]
    assert len(names) == 256
    assert names[-1].endswith(f"{problem_id(records[-1].problem)}.json")


def test_a_record_that_was_replaced_after_it_was_found_damaged_is_not_lost(root):
    """Without locks a writer can come between looking and moving: the file that was moved is then a good one."""
    from tunebook.stores._files import set_aside

    store = DirectoryStore(root)
    store.put(example_record())
    path = file_of(root)
    set_aside(path, path.stat().st_ino + 1, root / "v1" / "quarantine", now_s=1.0)
    assert store.get(example_record().problem) == example_record()
    assert quarantined(root) == []


@given(content=st.binary(max_size=300))
@settings(max_examples=100, deadline=None)
def test_random_bytes_in_place_of_a_record_are_a_miss(content):
    forget_warnings()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        store = DirectoryStore(root)
        store.put(example_record())
        file_of(root).write_bytes(content)
        with pytest.warns(TunebookWarning, match="unreadable"):
            assert store.get(example_record().problem) is None


@pytest.mark.promise("damage-is-a-miss")
@pytest.mark.filterwarnings("ignore::tunebook._base.errors.TunebookWarning")
def test_no_flipped_bit_and_no_truncation_gives_a_wrong_value(root):
    store = DirectoryStore(root)
    record = example_record()
    store.put(record)
    path, data = file_of(root), record.to_bytes()
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        for content in (bytes(damaged), data[:position]):
            path.write_bytes(content)
            assert store.get(record.problem) is None


# Places that cannot be used


@pytest.mark.promise("others-books")
def test_a_root_that_others_can_write_to_is_not_used(root):
    DirectoryStore(root).put(example_record())
    root.chmod(0o777)
    store = DirectoryStore(root)
    with pytest.warns(TunebookWarning, match=f"chmod go-w {root}") as caught:
        found = store.get(example_record().problem), list(store.items()), store.leases()
    assert found == (None, [], None)
    assert len(caught) == 1
    for write in (store.put, lambda record: store.delete(record.problem)):
        with pytest.raises(StoreError, match="chmod go-w") as refused:
            write(example_record())
        assert refused.value.kind == "unsafe"
    root.chmod(0o755)
    assert store.get(example_record().problem) == example_record()


@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_group_and_others_each_make_a_root_unsafe(root, mode):
    root.mkdir()
    root.chmod(mode)
    with pytest.raises(StoreError, match="lets others write"):
        DirectoryStore(root).put(example_record())


def test_a_safe_root_with_an_unsafe_directory_in_it_is_not_used(root):
    DirectoryStore(root).put(example_record())
    (root / "v1").chmod(0o775)
    with pytest.warns(TunebookWarning, match=f"chmod go-w {root}/v1"):
        assert DirectoryStore(root).get(example_record().problem) is None


def test_a_root_made_by_us_is_safe_whatever_the_umask(root):
    before = os.umask(0)
    try:
        assert DirectoryStore(root).leases().create("k.1", b"")  # a lease comes before the first put
        DirectoryStore(root).put(example_record())
    finally:
        os.umask(before)
    assert DirectoryStore(root).get(example_record().problem) == example_record()


def test_a_file_in_place_of_the_root_says_so(root):
    root.write_text("in the way")
    with pytest.raises(StoreError, match="Move the file") as caught:
        DirectoryStore(root).put(example_record())
    assert caught.value.kind == "not-a-directory"
    with pytest.raises(StoreError, match="counts as empty"):
        DirectoryStore(root).get(example_record().problem)


def test_a_root_whose_parents_cannot_be_made_is_an_error_with_a_remedy(tmp_path):
    (tmp_path / "home").symlink_to(tmp_path / "gone")
    store = DirectoryStore(tmp_path / "home" / ".cache" / "tunebook")
    assert store.get(example_record().problem) is None
    with pytest.raises(StoreError, match="TUNEBOOK_HOME") as caught:
        store.put(example_record())
    assert caught.value.kind == "missing"


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def run(*line):
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def open_to_nobody(tmp_path):
    """A directory that another user can reach."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


@needs_root
def test_a_root_of_another_user_is_not_used(root):
    DirectoryStore(root).put(example_record())
    os.chown(root, 65534, 65534)
    with pytest.warns(TunebookWarning, match="belongs to another user .* chown"):
        assert DirectoryStore(root).get(example_record().problem) is None


@needs_root
def test_a_root_of_the_administrator_is_read_but_cannot_be_written(open_to_nobody):
    DirectoryStore(open_to_nobody).put(example_record())
    told = run(*command("as_nobody", open_to_nobody))
    assert told == {"get": "something", "items": "something", "put": "permission", "warnings": []}


@needs_root
def test_no_permission_to_read_is_an_error_of_its_own_kind(open_to_nobody):
    DirectoryStore(open_to_nobody).put(example_record())
    (open_to_nobody / "v1").chmod(0o700)
    told = run(*command("as_nobody", open_to_nobody))
    assert (told["get"], told["items"], told["put"]) == ("permission",) * 3


@needs_root
def test_a_missing_home_that_cannot_be_made_is_a_permission_fault(open_to_nobody):
    told = run(*command("as_nobody", open_to_nobody / "home" / ".cache" / "tunebook"))
    assert told == {"get": "nothing", "items": "nothing", "put": "permission", "warnings": []}


def mounted(directory, options, before, *line):
    """Run a command where `directory` is a file system of its own; `before` is shell code run inside it first."""
    directory.mkdir(exist_ok=True)
    script = f'mount -t tmpfs -o {options} none "$0" && {before} && exec "$@"'
    return run("unshare", "-m", "bash", "-c", script, str(directory), *line)


@pytest.mark.promise("full-disk")
@needs_mounts
@pytest.mark.parametrize("name", ["book", "book.json"])
def test_a_full_disk_is_an_error_and_loses_nothing_that_was_kept(tmp_path, name):
    disk = tmp_path / "disk"
    told = mounted(disk, "size=300k,mode=755", "true", *command("fill", disk / name))
    assert told["kinds"] == ["full"]
    assert "stay in memory" in told["message"]
    assert "Free some space" in told["message"]
    assert 5 < told["kept"] < 200
    assert told["readable"] == told["kept"]
    assert told["temporary_files_left"] == 0


def _book_with_a_damaged_record(path):
    store = open_store(path)
    store.put_many([example_record(call_key="good"), example_record(call_key="damaged", config="spoil me")])
    for file in [path] if path.is_file() else path.glob("v1/cpu/*/*.json"):
        file.write_bytes(file.read_bytes().replace(b"spoil me", b"spoilt"))


@pytest.mark.promise("full-disk")
@needs_mounts
@pytest.mark.parametrize("name", ["book", "book.json"])
def test_a_read_only_mount_still_answers_and_refuses_writes(tmp_path, name):
    disk, book = tmp_path / "disk", tmp_path / name
    _book_with_a_damaged_record(book)
    before = f'cp -r "{book}" "$0" && mount -o remount,ro "$0"'
    told = mounted(disk, "mode=755", before, *command("read_only", disk / name))
    assert told == {"found": True, "damaged": False, "warnings": 1, "kinds": ["read-only", "read-only"]}


def test_a_limit_on_file_sizes_is_an_error_of_its_own_kind(root):
    import resource

    DirectoryStore(root).put(example_record(config="old"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(StoreError, match="ulimit -f") as caught:
            DirectoryStore(root).put(example_record(config="new"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.kind == "file-size"
    assert DirectoryStore(root).get(example_record().problem) == example_record(config="old")


def test_a_quota_is_told_apart_from_a_full_disk(root):
    def over_quota(descriptor):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with pytest.raises(StoreError, match="quota") as caught:
        DirectoryStore(root, sync=over_quota).put(example_record())
    assert caught.value.kind == "quota"


def test_faults_name_the_root_so_that_a_full_disk_is_one_warning(root):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    paths = set()
    for number in range(3):
        with pytest.raises(StoreError, match="No space left") as caught:
            DirectoryStore(root, sync=full).put(example_record(call_key=str(number)))
        paths.add(caught.value.path)
    assert paths == {str(root)}


# Garbage
