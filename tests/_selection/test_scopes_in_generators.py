"""Blocks that begin and end in generators, whose code runs in the context of the caller."""

from __future__ import annotations

import asyncio

import pytest

import tunebook as tb


@tb.tunable(
    space=[{"s": s} for s in range(4)],
    heuristic={"s": 0},
    check=False,
    store=False,
    policy=tb.AutotunePolicy(cache_miss_fallback="heuristics"),
)
def kernel(x, *, config):
    return config.s


def overlaid(s):
    with kernel.overlay(s=s):
        yield kernel(1)
        yield kernel(1)


@pytest.mark.promise("blocks-end")
def test_a_block_in_a_generator_that_ends_first_leaves_the_block_of_a_later_generator():
    first, second = overlaid(1), overlaid(2)
    assert (next(first), next(second)) == (1, 2)
    first.close()
    assert next(second) == 2
    second.close()
    assert kernel(1) == 0


@pytest.mark.promise("blocks-end")
def test_a_block_in_an_async_generator_that_is_left_early_ends_with_the_generator():
    async def numbers():
        with kernel.overlay(s=3):
            yield kernel(1)
            yield kernel(1)

    async def main():
        async for number in numbers():
            assert number == 3
            break
        for _ in range(5):
            await asyncio.sleep(0)  # the event loop closes the generator in a task of its own
        return kernel(1)

    assert asyncio.run(main()) == 0
    assert kernel(1) == 0


def test_a_task_that_was_started_inside_a_block_keeps_it():
    async def later(begun):
        await begun.wait()
        return kernel(1)

    async def main():
        begun = asyncio.Event()
        with kernel.overlay(s=2):
            task = asyncio.create_task(later(begun))
            await asyncio.sleep(0)
        begun.set()
        return await task, kernel(1)

    assert asyncio.run(main()) == (2, 0)
