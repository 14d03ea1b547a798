"""The answers of a selector to calls of `Kernel` objects, which programs often make anew for every call.

The key of an answer is as fine as the key of the memory tier: the op id and version of the kernel, and the call. It
holds nothing of the kernel object itself, so that a new object per call finds the answer of the last one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from tunebook._arrays.describe import is_traced
from tunebook._base.environment_variables import accelerator_wanted
from tunebook._hotpath.codegen import find_pack
from tunebook._hotpath.dispatcher import memoised_answer
from tunebook._kernel.kernel import Kernel
from tunebook._keys.call_key import fast_key_of
from tunebook._memo.answer_memo import MEMO, Answers
from tunebook._memo.context_stack import INNERMOST
from tunebook._selection.recording import recordings

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from tunebook._hotpath.codegen import Pack
    from tunebook._kernel.kernel import Invocation
    from tunebook._selection.selector import ConfigSelectorChain, Selection
    from tunebook._tuning.in_call_session import InCallSession

C = TypeVar("C")


def _is_keyed_by_arguments(inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> bool:
    given = inv.override_cfg, inv.method, inv.batch_axes, inv.surroundings, kernel.key_builder
    return all(each is None for each in given) and type(kernel).problem is Kernel.problem


class KernelMemo(Generic[C]):
    """Memoises a selector's answers by op id and call."""

    def __init__(self, selector: ConfigSelectorChain[C]) -> None:
        self._selector = selector
        self._answers: Final = Answers()
        self._pack: Pack | None = None
        MEMO.register(self._answers)

    def choose(self, inv: Invocation[C, Any], kernel: Kernel[C, Any]) -> tuple[C, InCallSession[C] | None]:
        """Return the configuration of a call and, while candidates are tried in calls, the session that runs it."""
        if not _is_keyed_by_arguments(inv, kernel):
            selection = self._selector.select(inv, kernel)
            return selection.config, selection.exploration
        op = kernel.op_id, kernel.version
        key = self.key(op, inv.args, inv.kwargs)
        found = None if key is None else self.find(key)
        if found is not None:
            return found, None
        selection = self.select(op, inv, kernel)
        return selection.config, selection.exploration

    def key(self, op: Hashable, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable | None:
        """Return the key of a call, or None if an argument has no cheap key; such a call goes the long way."""
        pack = self._pack
        values = (*args, *kwargs.values())
        if pack is not None:
            packed = pack(*values)
            if packed is not None:
                return op, len(args), *kwargs, packed
        try:
            # Classes and enums are not packed, and most calls have one or two beside twenty values that are.
            parts = [(pack and pack(x)) or fast_key_of(x) for x in values]
            key = op, len(args), *kwargs, *parts
            hash(key)
        except (TypeError, AttributeError, RuntimeError):
            return None
        return key

    def find(self, key: Hashable) -> C | None:
        """Return the memoised configuration, after telling the listeners; None if the tiers have to be asked."""
        # Only where nothing is scoped: an overlay or a policy of this thread or task may change the answer.
        answer = self._answers.known.get(key) if INNERMOST.get() is None else None
        if answer is None or (MEMO.suspended and recordings()):
            return None
        if answer.tell is not None:
            answer.tell()
        return answer.config  # type: ignore[no-any-return]

    def select(self, op: Hashable, inv: Invocation[C, Any], kernel: Kernel[C, Any]) -> Selection[C]:
        """Ask the tiers, and memoise their answer for calls of the same kind."""
        epoch = MEMO.epoch
        if accelerator_wanted():
            self._pack = find_pack(layout=True)  # the arguments may come from a library that was loaded just now
        key = self.key(op, inv.args, inv.kwargs)
        problem = None if key is None else self._answers.problems.get(key)
        selection = self._selector.select(inv, kernel, problem)
        if key is None:
            return selection
        # A trace has no values to tune on. If that failed, the same call with values of its own is tuned.
        guessed = selection.event == "heuristics" and is_traced(inv)
        lasting = not selection.transient and selection.exploration is None and not guessed
        if lasting and INNERMOST.get() is None and not recordings():
            answer = memoised_answer(selection, self._selector.listeners)
            MEMO.remember(self._answers, selection.problem, key, answer, epoch=epoch)
        if problem is None:
            MEMO.note(self._answers, key, selection.problem)
        return selection
