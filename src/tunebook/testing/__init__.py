"""The test kit: contracts that a store, a search strategy or an array library of your own inherits as tests.

In a test file of your own::

    from tunebook.testing import ArrayLibraryContract, StoreContract, StrategyContract

    class TestMyStore(StoreContract):
        def open(self, tmp_path):
            return MyStore(tmp_path / "book")

    class TestMyStrategy(StrategyContract):
        def make(self, space, **options):  # seed= and start=
            return MyStrategy(space, **options)

    class TestMyArrays(ArrayLibraryContract):
        name = "mylib"

        def arrays(self):
            return [mylib.zeros(3), mylib.zeros((2, 2))]

        def write(self, x):
            x += 1
            return True

A read-only store takes `ReadOnlyStoreContract` and returns a store with given records in `fill`. The tests need pytest,
which this module itself does not import. For assertion messages with values in them, put
`pytest.register_assert_rewrite("tunebook.testing")` into your `conftest.py`.
"""

from tunebook._measure.stopwatch import Stopwatch as Stopwatch
from tunebook.testing._array_library import ArrayLibraryContract as ArrayLibraryContract
from tunebook.testing._contracts import AWKWARD_NAMES as AWKWARD_NAMES
from tunebook.testing._contracts import ReadOnlyStoreContract as ReadOnlyStoreContract
from tunebook.testing._contracts import StoreContract as StoreContract
from tunebook.testing._contracts import StrategyContract as StrategyContract
from tunebook.testing._contracts import example_record as example_record
from tunebook.testing._contracts import refuses_writes as refuses_writes
from tunebook.testing._landscape import Landscape as Landscape
