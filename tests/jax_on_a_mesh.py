"""Checks that need several devices, run with 8 by test_jax_sharding.py. Each prints its name and "ok"."""

from __future__ import annotations

import json
import traceback

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from kernels import cpu_tuner

import tunebook as tb

X = jnp.arange(8.0 * 64).reshape(8, 64)


def mesh(kind=AxisType.Auto, shape=(8,), names=("d",)):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names), devices=jax.devices()[: int(np.prod(shape))])


def decoy_or(x, way, good):
    return good + 0.0 * lax.fori_loop(0, 50_000, lambda i, v: v * 0.999 + 0.001, x) if way == "decoy" else good


def kernel(body=lambda x: x * 2.0, **options):
    return tb.tunable(
        lambda x, *, config: decoy_or(x, config.way, body(x)),
        space=tb.Space(way=["decoy", "good"]), heuristic={"way": "decoy"}, name="k", store=False,
        tuner=cpu_tuner(), **options,
    )  # fmt: skip


def keys(k):
    return list(k.selector.cache.keys())


def chosen(k):
    return [k.selector.cache.get(*p).way for p in keys(k)]


def facts(k):
    return [json.loads(p.call_key).get("@jax") for p in keys(k)]


def put(spec, kind=AxisType.Auto, **options):
    return jax.device_put(X, NamedSharding(mesh(kind, **options), spec))


def a_sharding_is_part_of_the_key_of_an_eager_call():
    k = kernel()
    arrays = [X, put(P("d")), put(P(None, "d")), put(P()), put(P("a"), shape=(4, 2), names=("a", "b")),
              put(P(("a", "b")), shape=(4, 2), names=("a", "b"))]  # fmt: skip
    assert len({k.problem(x) for x in arrays}) == len(arrays)
    assert k.problem(put(P("d"))) == k.problem(put(P("d", None)))


def an_eager_call_on_sharded_arrays_is_tuned_on_them():
    k = kernel()
    out = k(put(P("d")))
    assert np.allclose(out, X * 2)
    assert chosen(k) == ["good"]
    assert out.sharding.spec == P("d"), out.sharding


def arrays_on_some_of_the_devices_stay_there():
    k, seen = kernel(), set()
    some = jax.sharding.Mesh(np.array(jax.devices()[4:]), ("d",))
    x = jax.device_put(X, NamedSharding(some, P("d")))
    k.selector.listen(lambda event, **data: seen.add(event))
    assert k(x).sharding.device_set == set(jax.devices()[4:])
    assert chosen(k) == ["good"], seen


def a_sharded_array_makes_no_mesh_for_its_kernel():
    seen = set()
    k = tb.tunable(
        lambda x, *, config: (seen.add(jax.sharding.get_abstract_mesh().empty), x)[1], space=tb.Space(b=[1, 2]),
        name="m", store=False,
    )  # fmt: skip
    k(put(P("d")))
    assert seen == {True}


def hot_calls_tell_shardings_apart():
    k = tb.tunable(lambda x, *, config: config.b, space=tb.Space(b=[0]), name="hot", store=False)
    arrays = [X, put(P("d")), put(P(None, "d")), jax.device_put(X, jax.devices()[3])]
    for i, x in enumerate(arrays):
        k.selector.cache.put(*k.problem(x), tb.Config(b=i))
    expected = [k.selector.cache.get(*k.problem(x)).b for x in arrays]
    assert expected[:3] == [3, 1, 2], "one device is like another"
    for _ in range(4):
        assert [k(x) for x in arrays] == expected


def an_explicit_sharding_has_the_same_key_in_a_trace():
    k, seen = kernel(), []
    with jax.set_mesh(mesh(AxisType.Explicit)):
        x = jax.device_put(X, P("d"))
        jax.jit(lambda x: seen.append(k.problem(x)) or x)(x)
        assert seen[0] == k.problem(x)
    assert seen[0] != k.problem(X)


def explicitly_sharded_candidates_run_sharded():
    seen = set()
    k = tb.tunable(
        lambda x, *, config: (seen.add(str(jax.typeof(x))), x * config.b)[1], space=tb.Space(b=[1.0, 2.0]), name="e",
        store=False, check=False,
    )  # fmt: skip
    with jax.set_mesh(mesh(AxisType.Explicit)):
        jax.jit(k)(jax.device_put(X, P("d")))
    assert seen == {"float32[8@d,64]"}, seen


def inside_shard_map_the_key_has_local_shapes_and_the_mesh():
    k = kernel()
    jax.jit(jax.shard_map(k, mesh=mesh(), in_specs=P("d"), out_specs=P("d")))(X)
    assert "[1,64]" in keys(k)[0].call_key
    assert facts(k) == [{"mesh": [["d", 8, "Manual"]]}]
    jax.jit(jax.shard_map(k, mesh=mesh(shape=(4,)), in_specs=P("d"), out_specs=P("d")))(X)
    assert len(facts(k)) == 2


def collectives_inside_a_tuned_kernel_work():
    k = kernel(lambda x: lax.psum(x, "a") + lax.all_gather(x, "b").sum(0))
    f = jax.shard_map(
        k, mesh=mesh(shape=(4, 2), names=("a", "b")), in_specs=P("a", "b"), out_specs=P("a", "b"),
        check_vma=False,
    )  # fmt: skip
    jax.jit(f)(X)
    assert chosen(k) == ["good"]


def a_mesh_that_is_manual_in_part_works():
    k = kernel(lambda x: lax.psum(x, "a"))
    f = jax.shard_map(
        k, mesh=mesh(shape=(4, 2), names=("a", "b")), in_specs=P("a"), out_specs=P("a"),
        axis_names={"a"}, check_vma=False,
    )  # fmt: skip
    jax.jit(f)(X)
    assert chosen(k) == ["good"], facts(k)


def vmap_inside_shard_map_works():
    k = kernel(lambda x: x + lax.psum(x, "d"))
    f = jax.shard_map(jax.vmap(k), mesh=mesh(shape=(4,)), in_specs=P("d"), out_specs=P("d"))
    jax.jit(f)(X)
    assert chosen(k) == ["good"]
    assert facts(k) == [{"mesh": [["d", 4, "Manual"]], "vmap": [[0, 0, 0, 2, None]]}]


def a_constraint_on_an_automatic_mesh_works():
    k = kernel(lambda x: lax.with_sharding_constraint(x * 2.0, P("d")))
    with jax.set_mesh(mesh()):
        jax.jit(k)(X)
    assert chosen(k) == ["good"]


def a_mesh_of_one_device_is_no_mesh():
    k = kernel()
    assert k.problem(put(P("d"), shape=(1,))) == k.problem(X)


def the_default_device_is_where_a_traced_call_is_tuned():
    seen = set()
    k = tb.tunable(
        lambda x, *, config: (seen.add(jax.default_device.value), x)[1], space=tb.Space(b=[1, 2]), name="d",
        store=False,
    )  # fmt: skip
    with jax.default_device(jax.devices()[5]):
        jax.jit(k)(jnp.ones(4))
    assert seen == {jax.devices()[5]}


def uneven_or_even():
    """One device works while the others are done, or all work a little: the latter is 20 times as fast as a whole."""

    def body(x, *, config):
        rounds = jnp.where(lax.axis_index("d") == 7, 200_000, 0) if config.way == "uneven" else 1000
        return x + 0.0 * lax.fori_loop(0, rounds, lambda i, v: v * 0.999 + 0.001, x)

    return tb.tunable(
        body, space=tb.Space(way=["uneven", "even"]), heuristic={"way": "uneven"}, name="uneven", store=False,
        tuner=cpu_tuner(),
    )  # fmt: skip


def over_the_mesh(f):
    return jax.shard_map(f, mesh=mesh(), in_specs=P("d"), out_specs=P("d"), check_vma=False)


def the_slowest_device_decides_inside_shard_map():
    k = uneven_or_even()
    jax.jit(over_the_mesh(k))(X)
    assert chosen(k) == ["even"]


def the_slowest_device_decides_for_sharded_arrays():
    k = tb.tunable(
        lambda x, *, config: over_the_mesh(lambda y: uneven_or_even()(y, config=dict(config)))(x),
        space=tb.Space(way=["uneven", "even"]), heuristic={"way": "uneven"}, name="around", store=False,
        tuner=cpu_tuner(),
    )  # fmt: skip
    k(put(P("d")))
    assert chosen(k) == ["even"]


CHECKS = [check for name, check in list(globals().items()) if callable(check) and name.count("_") >= 3]

if __name__ == "__main__":
    for check in CHECKS:
        try:
            check()
        except Exception:  # noqa: BLE001 - said, and then the next one
            print(json.dumps([check.__name__, traceback.format_exc()]), flush=True)
        else:
            print(json.dumps([check.__name__, "ok"]), flush=True)
