"""The test kit: what every store must do, as tests that a new engine inherits.

A store that can be written to, in a test file of your own::

    from tunebook.testing import StoreContract

    class TestMyStore(StoreContract):
        def open(self, tmp_path):
            return MyStore(tmp_path / "book")

One that cannot be written to takes `ReadOnlyStoreContract` and says how it comes by its records, in `fill`. The tests
need pytest, which this module itself does not import. For assertion messages with values in them, put
`pytest.register_assert_rewrite("tunebook.testing")` into your `conftest.py`.
"""

from tunebook._measure.stopwatch import Stopwatch as Stopwatch
from tunebook.testing._contracts import AWKWARD_NAMES as AWKWARD_NAMES
from tunebook.testing._contracts import ReadOnlyStoreContract as ReadOnlyStoreContract
from tunebook.testing._contracts import StoreContract as StoreContract
from tunebook.testing._contracts import example_record as example_record
from tunebook.testing._contracts import refuses_writes as refuses_writes
from tunebook.testing._landscape import Landscape as Landscape
