"""The tests that the record of every array library must pass."""
# ruff: noqa: S101 - a test kit is made of asserts, and the names of its tests are sentences

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import combinations
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tunebook._api.tunable import tunable
from tunebook._arrays.describe import arrays_in, describe, device_of, is_array, libraries_of, timer_for
from tunebook._arrays.device_fingerprint import device_fingerprint
from tunebook._arrays.library import ArraySpec, library_named, library_of
from tunebook._arrays.made_up import duplicate, materialise
from tunebook._base.config_codec import classes_of, decode, encode
from tunebook._kernel.output_check import difference
from tunebook._keys.call_key import call_key, fast_key_of
from tunebook._measure.argument_restore import Restorer
from tunebook._space.space import Space

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import ClassVar


@dataclass
class ArrayHolder:
    """An argument with an array inside."""

    x: Any


class ArrayLibraryContract:
    """The tests of an array library. Subclass it, set `name`, and define `arrays` and `write`.

    Registering the record is up to the test file: import the module that does it.
    """

    name: ClassVar[str]

    def arrays(self) -> Sequence[Any]:
        """Return new arrays, each with another shape, dtype or layout, and with at least one element."""
        raise NotImplementedError

    def write(self, x: Any) -> bool:  # noqa: ARG002 - for subclasses
        """Change every element of an array in place and return True; return False if arrays cannot be written to."""
        return False

    def test_its_arrays_are_found_however_deep_they_lie(self) -> None:
        for x in self.arrays():
            nested = {"a": [(ArrayHolder(MappingProxyType({"x": x})),)]}
            assert is_array(x)
            assert [found is x for found in arrays_in(nested)] == [True]
            assert library_of(x).name == self.name
            assert libraries_of(nested) == {self.name}

    def test_arrays_are_described_by_numbers_and_names(self) -> None:
        for x in self.arrays():
            spec = describe(x)
            assert spec == describe(x)
            assert spec.library == self.name
            assert all(type(n) is int for n in spec.shape)
            assert spec.dtype
            assert spec.layout

    def test_a_spec_can_be_saved(self) -> None:
        for x in self.arrays():
            assert decode(encode(describe(x)), classes_of([ArraySpec])) == describe(x)

    def test_the_device_of_an_array_has_a_name(self) -> None:
        for x in self.arrays():
            assert device_fingerprint(device_of(ArrayHolder(x)))

    def test_different_arrays_have_different_keys(self) -> None:
        keys = [call_key({"x": x}) for x in self.arrays()]
        assert len(set(keys)) == len(keys)
        assert keys == [call_key({"x": x}) for x in self.arrays()]
        assert keys == [call_key({"x": describe(x)}) for x in self.arrays()]

    def test_a_fast_key_is_stable_and_as_fine_as_the_call_key(self) -> None:
        for x, again in zip(self.arrays(), self.arrays(), strict=True):
            assert hash(fast_key_of(x)) == hash(fast_key_of(x))
            assert fast_key_of(x) == fast_key_of(again)
        for x, y in combinations(self.arrays(), 2):
            assert fast_key_of(x) != fast_key_of(y)

    def test_a_copy_is_the_same_until_the_array_is_written_to(self) -> None:
        for x in self.arrays():
            library = library_of(x)
            copy = library.copy(x)
            assert library.is_same(x, copy)
            assert library.is_writable(x) == self.write(x)
            if library.is_writable(x):
                assert not library.is_same(x, copy), "the copy shares memory with the array"
                library.put_back(x, copy)
                assert library.is_same(x, copy)

    def test_a_duplicate_has_the_values_and_the_layout_of_an_array_in_memory_of_its_own(self) -> None:
        for x in self.arrays():
            library = library_of(x)
            if library.duplicate is None and not library.is_writable(x):
                continue  # such an array is an error of `Measure(inputs=...)`
            made = duplicate(x)
            assert made is not x
            assert describe(made) == describe(x)
            assert difference(made, x) is None
            if self.write(made):
                assert difference(made, x) is not None, "the duplicate shares memory with the array"

    def test_an_array_that_a_run_wrote_to_is_restored(self) -> None:
        for x, fresh in zip(self.arrays(), self.arrays(), strict=True):
            restorer = Restorer(((ArrayHolder([x]),), {}))
            wrote = self.write(x)
            restorer.notice()
            assert restorer.has_changes == wrote
            assert difference(x, fresh) is None
            assert library_of(x).is_restorable(x)

    def test_outputs_are_compared_by_their_values(self) -> None:
        for x, again in zip(self.arrays(), self.arrays(), strict=True):
            assert difference(x, again) is None
            assert difference([x], ArrayHolder([again]).x) is None
            if self.write(x):
                assert difference(x, again) is not None

    def test_made_up_arrays_describe_as_their_spec_and_are_the_same_for_the_same_seed(self) -> None:
        if library_named(self.name).make is None:
            return
        for x in self.arrays():
            made, again = materialise(describe(x), 1), materialise(describe(x), 1)
            assert describe(made) == describe(x)
            assert difference(made, again) is None

    def test_a_timer_waits_for_a_run(self) -> None:
        for x in self.arrays():
            timer = timer_for(ArrayHolder(x))
            if timer is not None:
                assert timer.name
                timer.wait(x)
                assert timer.sample_s(partial(self.write, x), 1) >= 0

    def test_tuning_leaves_the_effect_of_one_run(self) -> None:
        @tunable(space=Space(way=[1, 2]), heuristic={"way": 1}, store=False, check=False)
        def kernel(holder: ArrayHolder, *, config: Any) -> None:  # noqa: ARG001 - both candidates do the same
            self.write(holder.x)

        for x, once in zip(self.arrays(), self.arrays(), strict=True):
            self.write(once)
            kernel(ArrayHolder(x))
            assert difference(x, once) is None
