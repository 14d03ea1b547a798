"""tunebook: finds the fastest correct configuration of a kernel once, and hands it out at the cost of a dict lookup."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from tunebook._api.executor import Executor as Executor
from tunebook._api.explain import Explanation as Explanation
from tunebook._api.tunable import Tunable as Tunable
from tunebook._api.tunable import tunable as tunable
from tunebook._api.tunable import tune as tune
from tunebook._api.tunable import tune_all as tune_all
from tunebook._api.tunable import tune_together as tune_together
from tunebook._api.tunable import verify as verify
from tunebook._api.tune_cache import AutotuneError as AutotuneError
from tunebook._api.tune_cache import AutotuneOutcome as AutotuneOutcome
from tunebook._api.tune_cache import AutotuneResult as AutotuneResult
from tunebook._api.tune_cache import Hit as Hit
from tunebook._api.tune_cache import Match as Match
from tunebook._api.tune_cache import Miss as Miss
from tunebook._api.tune_cache import NoMatch as NoMatch
from tunebook._api.tune_cache import Pending as Pending
from tunebook._api.tune_cache import ToBeVerified as ToBeVerified
from tunebook._api.tune_cache import TuneCache as TuneCache
from tunebook._api.tune_cache import Unchecked as Unchecked
from tunebook._arrays.describe import ArraySpec as ArraySpec
from tunebook._arrays.device_fingerprint import device_fingerprint as device_fingerprint
from tunebook._arrays.device_fingerprint import environment_fingerprint as environment_fingerprint
from tunebook._arrays.device_fingerprint import get_device_platform as get_device_platform
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
from tunebook._kernel.kernel import Invocation as Invocation
from tunebook._kernel.kernel import Kernel as Kernel
from tunebook._kernel.policy import AutotunePolicy as AutotunePolicy
from tunebook._keys.buckets import anchor as anchor
from tunebook._keys.buckets import exact as exact
from tunebook._keys.buckets import multiple as multiple
from tunebook._keys.buckets import pow2 as pow2
from tunebook._keys.call_key import register_key as register_key
from tunebook._memo.answer_memo import epoch as epoch
from tunebook._memo.answer_memo import on_epoch as on_epoch
from tunebook._memo.memory import ConfigCache as ConfigCache
from tunebook._memo.overlay import overlay_cache as overlay_cache
from tunebook._selection.background_queue import wait_for_background as wait_for_background
from tunebook._selection.persistent_cache import PersistentCache as PersistentCache
from tunebook._selection.recording import Recording as Recording
from tunebook._selection.recording import clear_invocations as clear_invocations
from tunebook._selection.recording import get_invocations as get_invocations
from tunebook._selection.recording import record as record
from tunebook._selection.recording import record_invocation as record_invocation
from tunebook._selection.selector import ConfigSelectorChain as ConfigSelectorChain
from tunebook._selection.selector import policy_override as policy_override
from tunebook._space.choice import Choice as Choice
from tunebook._space.choice import Option as Option
from tunebook._space.choice import choice as choice
from tunebook._space.space import Config as Config
from tunebook._space.space import Space as Space
from tunebook._statistics.roofline import Peak as Peak
from tunebook._tuning.job import Tuned as Tuned
from tunebook._tuning.plan import forward_autotune_only as forward_autotune_only
from tunebook._tuning.reverify import Verified as Verified
from tunebook._tuning.tuner import Tuner as Tuner
from tunebook.stores._pack import write_pack as write_pack

__version__ = "0.1.0"

if _TYPE_CHECKING:
    from tunebook._report import metrics as metrics
    from tunebook._report import report as report
    from tunebook.formats._bundle import export_bundle as export_bundle
    from tunebook.formats._bundle import import_bundle as import_bundle
    from tunebook.formats._bundle import merge_into as merge_into

# Names that few processes need, loaded when they are asked for: importing them would take as long as all of the above.
_LATER = {
    "export_bundle": "tunebook.formats._bundle",
    "import_bundle": "tunebook.formats._bundle",
    "merge_into": "tunebook.formats._bundle",
    "metrics": "tunebook._report.metrics",
    "report": "tunebook._report",
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module 'tunebook' has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 - as above

    module = import_module(_LATER[name])
    return getattr(module, name, module)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
