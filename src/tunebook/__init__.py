"""tunebook: finds the fastest correct configuration of a kernel once, and hands it out at the cost of a dict lookup."""

TYPE_CHECKING = False  # type checkers go by this name; `typing` itself would take longer to import than all of this

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tunebook import fleet as fleet
    from tunebook import formats as formats
    from tunebook import search as search
    from tunebook import stores as stores
    from tunebook import testing as testing
    from tunebook._api.executor import ConfigChooser as ConfigChooser
    from tunebook._api.executor import Executor as Executor
    from tunebook._api.explain import Explanation as Explanation
    from tunebook._api.function_kernel import TunableOptions as TunableOptions
    from tunebook._api.recorded import AutotuningResult as AutotuningResult
    from tunebook._api.recorded import Entry as Entry
    from tunebook._api.recorded import autotune_recorded as autotune_recorded
    from tunebook._api.recorded import benchmark as benchmark
    from tunebook._api.table import ConfigTable as ConfigTable
    from tunebook._api.table import table as table
    from tunebook._api.tunable import tunable as tunable
    from tunebook._api.tunable import tune as tune
    from tunebook._api.tunable import tune_all as tune_all
    from tunebook._api.tunable import tune_together as tune_together
    from tunebook._api.tunable import verify as verify
    from tunebook._api.tunable_types import CHOSEN as CHOSEN
    from tunebook._api.tunable_types import Tunable as Tunable
    from tunebook._api.tune_cache import AutotuneError as AutotuneError
    from tunebook._api.tune_cache import AutotuneOutcome as AutotuneOutcome
    from tunebook._api.tune_cache import AutotuneResult as AutotuneResult
    from tunebook._api.tune_cache import CacheEntry as CacheEntry
    from tunebook._api.tune_cache import ChecksumState as ChecksumState
    from tunebook._api.tune_cache import Done as Done
    from tunebook._api.tune_cache import Hit as Hit
    from tunebook._api.tune_cache import Match as Match
    from tunebook._api.tune_cache import Miss as Miss
    from tunebook._api.tune_cache import NoMatch as NoMatch
    from tunebook._api.tune_cache import Pending as Pending
    from tunebook._api.tune_cache import ToBeVerified as ToBeVerified
    from tunebook._api.tune_cache import TuneCache as TuneCache
    from tunebook._api.tune_cache import TuneCacheResult as TuneCacheResult
    from tunebook._api.tune_cache import Unchecked as Unchecked
    from tunebook._arrays.device_families import device_alias as device_alias
    from tunebook._arrays.device_fingerprint import device_fingerprint as device_fingerprint
    from tunebook._arrays.device_fingerprint import environment_fingerprint as environment_fingerprint
    from tunebook._arrays.device_fingerprint import get_device_platform as get_device_platform
    from tunebook._arrays.library import ArrayLibrary as ArrayLibrary
    from tunebook._arrays.library import ArraySpec as ArraySpec
    from tunebook._arrays.library import register_array_library as register_array_library
    from tunebook._base.config_codec import register_codec as register_codec
    from tunebook._base.errors import CodecError as CodecError
    from tunebook._base.errors import CompileError as CompileError
    from tunebook._base.errors import DefinitionError as DefinitionError
    from tunebook._base.errors import Disagreement as Disagreement
    from tunebook._base.errors import MissingDependency as MissingDependency
    from tunebook._base.errors import NoConfig as NoConfig
    from tunebook._base.errors import StoreError as StoreError
    from tunebook._base.errors import TunebookError as TunebookError
    from tunebook._base.errors import TunebookWarning as TunebookWarning
    from tunebook._base.errors import TuningFailed as TuningFailed
    from tunebook._base.errors import UnkeyableError as UnkeyableError
    from tunebook._base.errors import Unsupported as Unsupported
    from tunebook._base.vocabulary import Measurement as Measurement
    from tunebook._base.vocabulary import Problem as Problem
    from tunebook._kernel.kernel import Cfg as Cfg
    from tunebook._kernel.kernel import Invocation as Invocation
    from tunebook._kernel.kernel import Kernel as Kernel
    from tunebook._kernel.kernel import Out as Out
    from tunebook._kernel.measure import Measure as Measure
    from tunebook._kernel.policy import AutotunePolicy as AutotunePolicy
    from tunebook._keys.buckets import anchor as anchor
    from tunebook._keys.buckets import exact as exact
    from tunebook._keys.buckets import multiple as multiple
    from tunebook._keys.buckets import pow2 as pow2
    from tunebook._keys.call_key import register_key as register_key
    from tunebook._memo.answer_memo import ConfigCache as ConfigCache
    from tunebook._memo.answer_memo import epoch as epoch
    from tunebook._memo.answer_memo import on_epoch as on_epoch
    from tunebook._memo.context_stack import overlay_cache as overlay_cache
    from tunebook._report import metrics as metrics
    from tunebook._report import report as report
    from tunebook._selection.deferred_tuning import wait_for_background as wait_for_background
    from tunebook._selection.invocation_registry import clear_invocations as clear_invocations
    from tunebook._selection.invocation_registry import get_invocations as get_invocations
    from tunebook._selection.invocation_registry import record_invocation as record_invocation
    from tunebook._selection.persistent_cache import PersistentCache as PersistentCache
    from tunebook._selection.recording import Recording as Recording
    from tunebook._selection.recording import record as record
    from tunebook._selection.selector import ConfigSelectorChain as ConfigSelectorChain
    from tunebook._selection.selector import policy_override as policy_override
    from tunebook._space.choice import Choice as Choice
    from tunebook._space.choice import Option as Option
    from tunebook._space.choice import choice as choice
    from tunebook._space.space import Config as Config
    from tunebook._space.space import Space as Space
    from tunebook._statistics.roofline import Peak as Peak
    from tunebook._tuning.job import Tuned as Tuned
    from tunebook._tuning.pause import pause_tuning as pause_tuning
    from tunebook._tuning.plan import forward_autotune_only as forward_autotune_only
    from tunebook._tuning.reverify import Verified as Verified
    from tunebook._tuning.tuner import Tuner as Tuner
    from tunebook.formats._bundle import export_bundle as export_bundle
    from tunebook.formats._bundle import import_bundle as import_bundle
    from tunebook.formats._bundle import merge_into as merge_into
    from tunebook.stores._pack import write_pack as write_pack

# The module of each public name. A name is loaded when it is first used, so that `import tunebook` takes 0.3 ms
# instead of 60. Type checkers and editors read the imports above; a test holds the two lists against each other.
_NAMES = {
    "_api.executor": "ConfigChooser Executor",
    "_api.explain": "Explanation",
    "_api.function_kernel": "TunableOptions",
    "_api.recorded": "autotune_recorded AutotuningResult benchmark Entry",
    "_api.table": "ConfigTable table",
    "_api.tunable": "tunable tune tune_all tune_together verify",
    "_api.tunable_types": "CHOSEN Tunable",
    "_api.tune_cache": "AutotuneError AutotuneOutcome AutotuneResult CacheEntry ChecksumState Done Hit Match Miss "
    "NoMatch Pending ToBeVerified TuneCache TuneCacheResult Unchecked",
    "_arrays.device_families": "device_alias",
    "_arrays.device_fingerprint": "device_fingerprint environment_fingerprint get_device_platform",
    "_arrays.library": "ArrayLibrary ArraySpec register_array_library",
    "_base.config_codec": "register_codec",
    "_base.errors": "CodecError CompileError DefinitionError Disagreement MissingDependency NoConfig StoreError "
    "TunebookError TunebookWarning TuningFailed UnkeyableError Unsupported",
    "_base.vocabulary": "Measurement Problem",
    "_kernel.kernel": "Cfg Invocation Kernel Out",
    "_kernel.measure": "Measure",
    "_kernel.policy": "AutotunePolicy",
    "_keys.buckets": "anchor exact multiple pow2",
    "_keys.call_key": "register_key",
    "_memo.answer_memo": "ConfigCache epoch on_epoch",
    "_memo.context_stack": "overlay_cache",
    "_report": "report",
    "_report.metrics": "metrics",
    "_selection.deferred_tuning": "wait_for_background",
    "_selection.invocation_registry": "clear_invocations get_invocations record_invocation",
    "_selection.persistent_cache": "PersistentCache",
    "_selection.recording": "record Recording",
    "_selection.selector": "ConfigSelectorChain policy_override",
    "_space.choice": "Choice choice Option",
    "_space.space": "Config Space",
    "_statistics.roofline": "Peak",
    "_tuning.job": "Tuned",
    "_tuning.pause": "pause_tuning",
    "_tuning.plan": "forward_autotune_only",
    "_tuning.reverify": "Verified",
    "_tuning.tuner": "Tuner",
    "fleet": "fleet",
    "formats": "formats",
    "formats._bundle": "export_bundle import_bundle merge_into",
    "search": "search",
    "stores": "stores",
    "stores._pack": "write_pack",
    "testing": "testing",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


if not TYPE_CHECKING:  # a type checker would take a module with `__getattr__` to have every name

    def __getattr__(name: str) -> object:
        if name == "__all__":  # read by `from tunebook import *` and `help()`
            return sorted(_MODULES)
        if name not in _MODULES:
            raise AttributeError(f"module 'tunebook' has no attribute {name!r}")
        from importlib import import_module  # noqa: PLC0415 - loaded late: 1 ms

        module = import_module(f"tunebook.{_MODULES[name]}")
        globals()[name] = value = getattr(module, name, module)  # `metrics` and the public folders are modules
        return value


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *_MODULES})
