"""Arrays of a library that is not numpy: keys, hot calls and codec on real jax arrays."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tunebook as tb
from tunebook._arrays.describe import describe
from tunebook._arrays.made_up import materialise
from tunebook._base.config_codec import decode, encode
from tunebook._hotpath.codegen import find_pack
from tunebook._measure.stopwatch import wait_for


def make(**options):
    @tb.tunable(space=tb.Space(b=[0]), name="on-jax", store=False, **options)
    def kernel(a, flag=True, dtype=None, *, config):
        return config.b

    return kernel


def test_a_jax_array_a_numpy_array_and_another_dtype_have_their_own_keys():
    kernel = make()
    arrays = [jnp.ones(4), np.ones(4, np.float32), jnp.ones(4, jnp.bfloat16), jnp.ones((2, 2)), jnp.ones(4, jnp.int32)]
    assert len({kernel.problem(a) for a in arrays}) == len(arrays)


def test_the_host_is_the_same_device_for_arrays_of_every_library():
    on_host = jax.device_put(np.ones(4, np.float32), jax.devices("cpu")[0])
    assert make().problem(on_host).device == tb.device_fingerprint()


def test_hot_calls_tell_libraries_and_dtypes_apart():
    kernel = make()
    arrays = [jnp.ones(4), np.ones(4, np.float32), jnp.ones(4, jnp.bfloat16), jnp.ones(4), jnp.ones((2, 2))]
    for a in arrays:
        kernel.selector.cache.put(*kernel.problem(a), tb.Config(b=str(kernel.problem(a))))
    for _ in range(4):
        for a in arrays:
            assert kernel(a) == str(kernel.problem(a))


def test_dtypes_as_arguments_are_told_apart():
    kernel = make()
    dtypes = [jnp.float32, jnp.bfloat16, jnp.int8, None]
    assert len({kernel.problem(jnp.ones(4), dtype=d) for d in dtypes}) == len(dtypes)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.bool_, np.dtype(jnp.bfloat16)], ids=str)
def test_dtypes_round_trip_in_configurations(dtype):
    assert decode(encode(dtype)) == dtype


def test_inside_a_trace_a_call_has_a_key():
    kernel = make()
    seen = []
    jax.jit(lambda x: seen.append(kernel.problem(x)) or x)(jnp.ones((3, 5)))
    assert "[3,5]" in seen[0].call_key


def test_a_shape_without_data_has_the_key_of_an_array_of_a_trace():
    kernel = make()
    spec = jax.ShapeDtypeStruct((3, 5), jnp.float32)
    seen = []
    jax.jit(lambda x: seen.append(kernel.problem(x)) or x)(jnp.ones((3, 5)))
    assert kernel.problem(spec) == seen[0]


def test_waiting_blocks_until_results_are_there():
    out = jax.jit(lambda x: {"a": (x @ x, [x + 1])})(jnp.ones((200, 200)))
    wait_for(out)
    assert all(leaf.is_ready() for leaf in jax.tree.leaves(out))


def test_on_several_devices_hot_calls_are_right():
    script = textwrap.dedent("""
        import jax, jax.numpy as jnp, tunebook as tb
        kernel = tb.tunable(lambda a, *, config: config.b, space=tb.Space(b=[0]), name="k", store=False)
        assert len(jax.devices()) == 4
        arrays = [jax.device_put(jnp.ones(n), d) for n in (4, 8) for d in jax.devices()]
        for a in arrays:
            kernel.selector.cache.put(*kernel.problem(a), tb.Config(b=kernel.problem(a)))
        for _ in range(4):
            for a in arrays:
                assert kernel(a) == kernel.problem(a)
        """)
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


# ------------------------------------------------------------------------------------------------------ the accelerator


@pytest.fixture
def pack():
    make().problem(jnp.ones(1))  # loads the adapter
    found = find_pack(layout=True)
    if found is None:
        pytest.skip("the accelerator was not built")
    return found


def in_trace(transform, function, *args):
    seen = []
    transform(lambda *a: (seen.append(function(*a)), jnp.sum(a[0]))[1])(*args)
    return seen[0]


def test_jax_arrays_are_packed_by_the_parts_of_their_keys(pack):
    shapes, dtypes = [(), (1,), (4,), (2, 2), (4, 1)], [jnp.float32, jnp.bfloat16, jnp.int32, jnp.bool_]
    arrays = [jnp.zeros(shape, dtype) for shape in shapes for dtype in dtypes]
    packed = {pack(x, 3) for x in arrays}
    assert len(packed) == len(arrays)
    assert {pack(x + 0 if x.dtype != jnp.bool_ else ~x, 3) for x in arrays} == packed


def test_an_array_of_a_trace_is_packed_as_a_real_one(pack):
    x = jnp.ones((3, 5))
    assert in_trace(jax.jit, pack, x) == pack(x)


def test_arrays_inside_a_vmap_or_a_grad_are_not_packed(pack):
    x = jnp.ones((3, 5))
    assert in_trace(jax.vmap, pack, x) is None
    assert in_trace(jax.grad, pack, x) is None


def test_settings_are_packed_with_jax_arrays_only(pack):
    x, plain = jnp.ones(3), (np.ones(3), 1)
    before = pack(x), pack((x, 1)), pack(*plain)
    with jax.default_matmul_precision("highest"):
        inside = pack(x), pack((x, 1)), pack(*plain)
    with jax.enable_x64(True):
        other = pack(x)
    assert len({before[0], inside[0], other}) == 3
    assert (before[1] == inside[1], before[2] == inside[2]) == (False, True)
    assert (pack(x), pack((x, 1)), pack(*plain)) == before
    with jax.default_matmul_precision("highest"):
        assert (pack(x), pack((x, 1)), pack(*plain)) == inside


def test_different_shapes_never_have_the_same_bytes_though_arrays_come_and_go(pack):
    seen = {}
    for n in range(1, 700):
        x = jax.ShapeDtypeStruct((n,), jnp.float32)
        packed = in_trace(lambda f, x=x: lambda *_: jax.eval_shape(f, x), pack)
        assert seen.setdefault(packed, n) == n
        del x
        if n % 50 == 0:
            jax.clear_caches()
            gc.collect()


def test_a_weakly_typed_array_has_its_own_key_and_is_made_up_weakly_typed():
    kernel = make()
    weak, strong = jnp.asarray(2.0), jnp.float32(2.0)
    assert weak.dtype == strong.dtype
    assert kernel.problem(weak) != kernel.problem(strong)
    seen = []
    jax.jit(lambda x: seen.append(kernel.problem(x)) or x)(2.0)  # a number of Python is weakly typed in a trace
    assert seen == [kernel.problem(weak)]
    made = [materialise(describe(x)) for x in (weak, strong)]
    assert [x.weak_type for x in made] == [True, False]
    assert kernel.problem(describe(weak)).call_key == kernel.problem(weak).call_key
