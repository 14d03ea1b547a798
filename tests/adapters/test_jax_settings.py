"""Settings of jax in the hot path: read by no call while they are the same everywhere, and never missed."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from test_jax_trace import python

from tunebook.adapters._jax.settings import Settings

KERNEL = """
import threading
import jax, jax.numpy as jnp, tunebook as tb
from tunebook.adapters._jax.settings import SETTINGS
def make(name="k"):
    k = tb.tunable(lambda x, *, config: config.b, space=tb.Space(b=["it"]), name=name, store=False)
    def put(text):
        k.selector.cache.put(*k.problem(X), tb.Config(b=text))
    return k, put
X = jnp.ones(4)
"""
WAYS = pytest.mark.parametrize("way", ["accelerated", "pure", "several devices"])


def run(way, script):
    devices = 4 if way == "several devices" else 1
    return python(KERNEL + script, devices=devices, TUNEBOOK_PURE="1" if way == "pure" else "")


@WAYS
def test_a_change_for_the_whole_process_is_a_new_key_that_no_call_has_to_read(way):
    said = run(way, """
k, put = make()
put("as jax comes")
print(k(X), k(X), SETTINGS.number[0] > 0)
jax.config.update("jax_default_matmul_precision", "highest")
put("highest")
print(k(X), k(X), SETTINGS.number[0] > 0)
jax.config.update("jax_default_matmul_precision", None)
print(k(X), k(X), SETTINGS.number[0] > 0)
    """)  # fmt: skip
    assert said == ["as jax comes as jax comes True", "highest highest True", "as jax comes as jax comes True"]


@WAYS
def test_a_block_of_one_thread_is_seen_by_that_thread_alone(way):
    said = run(way, """
k, put = make()
put("plain")
inside, done = threading.Event(), threading.Event()
def other():
    with jax.default_matmul_precision("highest"):
        put("highest")
        print(k(X), k(X))
        inside.set()
        done.wait()
        print(k(X), k(X))
    print(k(X))
print(k(X), k(X))
thread = threading.Thread(target=other)
thread.start()
inside.wait()
print(k(X), k(X), SETTINGS.number)
done.set()
thread.join()
print(k(X), SETTINGS.number[0] > 0)
    """)  # fmt: skip
    assert said == [
        "plain plain", "highest highest", "plain plain [0]", "highest highest", "plain", "plain True",
    ]  # fmt: skip


@pytest.mark.parametrize("others", [False, True])
def test_a_block_that_was_entered_before_the_adapter_was_imported_is_noticed(others):
    script = f"""
import threading
import jax, gc
listed, gc.get_objects = [], lambda get=gc.get_objects: listed.append(1) or get()
done = threading.Event()
if {others}:
    threading.Thread(target=done.wait).start()
with jax.default_matmul_precision("highest"):
    from tunebook.adapters._jax.settings import SETTINGS, HOOKED, Settings
    print(HOOKED, bool(listed))
print(Settings((jax.enable_x64,)).watch(), bool(listed))
done.set()
    """
    assert python(script) == [f"False {others}", f"True {others}"]


@WAYS
def test_a_block_that_sets_the_present_value_does_not_follow_a_change_for_all(way):
    said = run(way, """
k, put = make()
put("plain")
print(k(X), k(X))
inside, changed = threading.Event(), threading.Event()
def stays():
    with jax.default_matmul_precision(None):
        inside.set()
        changed.wait()
        print(k(X), k(X))
thread = threading.Thread(target=stays)
thread.start()
inside.wait()
jax.config.update("jax_default_matmul_precision", "highest")
put("highest")
print(k(X), k(X))
changed.set()
thread.join()
print(k(X))
    """)  # fmt: skip
    assert said == ["plain plain", "highest highest", "plain plain", "highest"]


@WAYS
def test_a_block_that_is_entered_again_finds_the_same_answers(way):
    said = run(way, """
k, put = make()
put("plain")
with jax.default_matmul_precision("highest"):
    put("highest")
one, two = set(), set()
for _ in range(50):
    with jax.default_matmul_precision("highest"):
        one.add((k(X), SETTINGS.own.value))
        with jax.enable_x64(True), jax.enable_x64(False):
            two.add((k(X), SETTINGS.own.value))
print(len(one), len(two), len(one | two), {text for text, _ in one | two}, SETTINGS.own.value, k(X))
    """)  # fmt: skip
    assert said == ["1 1 2 {'highest'} 0 plain"], "a number for each, or calls in it would be new ones each time"


def test_settings_of_two_threads_are_told_apart():
    said = python(KERNEL + """
k, put = make()
both = threading.Barrier(2)
def with_precision(name):
    with jax.default_matmul_precision(name):
        put(name)
        both.wait()
        found[name] = {k(X) for _ in range(50)}
        both.wait()
found = {}
threads = [threading.Thread(target=with_precision, args=(name,)) for name in ("highest", "high")]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(found["highest"], found["high"])
    """)  # fmt: skip
    assert said == ["{'highest'} {'high'}"]


def test_a_block_that_a_thread_was_in_before_the_adapter_was_loaded_counts():
    said = python("""
import threading, jax
inside, go = threading.Event(), threading.Event()
found = []
def other():
    with jax.enable_x64(True):
        inside.set()
        go.wait()
        found.append(k(1.0, X))
thread = threading.Thread(target=other)
thread.start()
inside.wait()
import jax.numpy as jnp, tunebook as tb
X = jnp.ones(4)
k = tb.tunable(lambda y, x, *, config: config.b, space=tb.Space(b=[0]), name="k", store=False)
k.selector.cache.put(*k.problem(1.0, X), tb.Config(b="plain"))
with jax.enable_x64(True):
    k.selector.cache.put(*k.problem(1.0, X), tb.Config(b="wide"))
print(k(1.0, X), k(1.0, X))
go.set()
thread.join()
print(*found)
    """)
    assert said == ["plain plain", "wide"]


def test_loading_the_adapter_changes_no_setting_and_leaves_no_block_entered():
    said = python("""
import jax
names = "enable_x64", "default_matmul_precision", "default_device"
read = lambda: [(getattr(jax, n).get_global(), getattr(jax, n).get_local()) for n in names]
before = read()
import tunebook.adapters.jax
print(read() == before)
    """)
    assert said == ["True"]


class Bare:
    """A setting of a jax that has no hooks for it."""

    __name__ = "enable_x64"
    value = False

    def __call__(self, _value):
        return nullcontext()


class Silent(Bare):
    """A setting of a jax that tells nobody of changes."""

    _update_global_hook = _update_thread_local_hook = None

    def get_global(self):
        return False

    get_local = get_global


def test_where_jax_does_not_tell_of_changes_every_call_reads_the_settings():
    settings = Settings([Silent()])
    settings.watch()
    assert settings.number == [0]


def test_without_jax_config_hooks_every_call_reads_the_settings():
    settings = Settings([Bare()])
    settings.watch()
    assert settings.number == [0]


def test_a_thread_that_ends_inside_a_block_costs_speed_and_nothing_else():
    said = python(KERNEL + """
k, put = make()
put("plain")
def ends():
    jax.default_matmul_precision("highest").__enter__()
thread = threading.Thread(target=ends)
thread.start()
thread.join()
print(k(X), k(X), SETTINGS.number)
    """)  # fmt: skip
    assert said == ["plain plain [0]"]
