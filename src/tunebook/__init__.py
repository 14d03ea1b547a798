"""tunebook: finds the fastest correct configuration of a kernel once, and hands it out at the cost of a dict lookup."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from tunebook._arrays import ArraySpec as ArraySpec
from tunebook._background import wait_for_background as wait_for_background
from tunebook._buckets import anchor as anchor
from tunebook._buckets import exact as exact
from tunebook._buckets import multiple as multiple
from tunebook._buckets import pow2 as pow2
from tunebook._cache import ConfigCache as ConfigCache
from tunebook._choice import Choice as Choice
from tunebook._choice import Option as Option
from tunebook._choice import choice as choice
from tunebook._codec import register_codec as register_codec
from tunebook._errors import CodecError as CodecError
from tunebook._errors import CompileError as CompileError
from tunebook._errors import DefinitionError as DefinitionError
from tunebook._errors import Disagreement as Disagreement
from tunebook._errors import MissingDependency as MissingDependency
from tunebook._errors import NoConfig as NoConfig
from tunebook._errors import StoreError as StoreError
from tunebook._errors import TunebookError as TunebookError
from tunebook._errors import TunebookWarning as TunebookWarning
from tunebook._errors import TuningFailed as TuningFailed
from tunebook._errors import UnkeyableError as UnkeyableError
from tunebook._errors import Unsupported as Unsupported
from tunebook._executor import Executor as Executor
from tunebook._explain import Explanation as Explanation
from tunebook._fingerprint import device_fingerprint as device_fingerprint
from tunebook._fingerprint import environment_fingerprint as environment_fingerprint
from tunebook._fingerprint import get_device_platform as get_device_platform
from tunebook._gate import epoch as epoch
from tunebook._gate import on_epoch as on_epoch
from tunebook._job import Tuned as Tuned
from tunebook._kernel import Invocation as Invocation
from tunebook._kernel import Kernel as Kernel
from tunebook._keys import register_key as register_key
from tunebook._overlay import overlay_cache as overlay_cache
from tunebook._persistent import PersistentCache as PersistentCache
from tunebook._planning import forward_autotune_only as forward_autotune_only
from tunebook._policy import AutotunePolicy as AutotunePolicy
from tunebook._registry import Recording as Recording
from tunebook._registry import clear_invocations as clear_invocations
from tunebook._registry import get_invocations as get_invocations
from tunebook._registry import record as record
from tunebook._registry import record_invocation as record_invocation
from tunebook._roofline import Peak as Peak
from tunebook._selection import ConfigSelectorChain as ConfigSelectorChain
from tunebook._selection import policy_override as policy_override
from tunebook._space import Config as Config
from tunebook._space import Space as Space
from tunebook._tunable import Tunable as Tunable
from tunebook._tunable import tunable as tunable
from tunebook._tunable import tune as tune
from tunebook._tunable import tune_all as tune_all
from tunebook._tunable import tune_together as tune_together
from tunebook._tunable import verify as verify
from tunebook._tune_cache import AutotuneError as AutotuneError
from tunebook._tune_cache import AutotuneOutcome as AutotuneOutcome
from tunebook._tune_cache import AutotuneResult as AutotuneResult
from tunebook._tune_cache import Hit as Hit
from tunebook._tune_cache import Match as Match
from tunebook._tune_cache import Miss as Miss
from tunebook._tune_cache import NoMatch as NoMatch
from tunebook._tune_cache import Pending as Pending
from tunebook._tune_cache import ToBeVerified as ToBeVerified
from tunebook._tune_cache import TuneCache as TuneCache
from tunebook._tune_cache import Unchecked as Unchecked
from tunebook._tuner import Tuner as Tuner
from tunebook._types import Measurement as Measurement
from tunebook._types import Problem as Problem
from tunebook._verify import Verified as Verified
from tunebook.stores._pack import write_pack as write_pack

__version__ = "0.1.0"

if _TYPE_CHECKING:
    from tunebook import _metrics as metrics  # noqa: F401 - a module under a public name
    from tunebook._bundle import export_bundle as export_bundle
    from tunebook._bundle import import_bundle as import_bundle
    from tunebook._bundle import merge_into as merge_into
    from tunebook._report import report as report

# Names that few processes need, loaded when they are asked for: importing them would take as long as all of the above.
_LATER = {
    "export_bundle": "tunebook._bundle",
    "import_bundle": "tunebook._bundle",
    "merge_into": "tunebook._bundle",
    "metrics": "tunebook._metrics",
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
