"""The answers of a selector to calls of `Kernel` objects, which programs often make anew for every call.

The key of an answer is as fine as the key of the memory tier: the op id and version of the kernel, and the call. It
holds nothing of the kernel object itself, so that a new object per call finds the answer of the last one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from tunebook._base.environment_variables import accelerator_wanted
from tunebook._hotpath.codegen import find_pack
from tunebook._hotpath.dispatcher import memoised_answer
from tunebook._kernel.kernel import Kernel
from tunebook._keys.call_key import fast_key_of
from tunebook._memo.answer_memo import MEMO, Answers
from tunebook._memo.context_stack import INNERMOST
from tunebook._selection.recording import recordings

if TYPE_CHECKING:
    from collections.abc import Hashable

    from tunebook._hotpath.codegen import Pack
    from tunebook._kernel.kernel import Invocation
    from tunebook._selection.selector import ConfigSelectorChain, Selection
    from tunebook._selection.tiers import Session

C = TypeVar("C")


def _is_keyed_by_arguments(inv: Any, kernel: Any) -> bool:
    given = inv.override_cfg, inv.method, inv.batch_axes, getattr(inv, "surroundings", None), kernel.key_builder
    # A kernel of another library has no `problem`: its adapter keys it as `Kernel` does.
    return all(each is None for each in given) and getattr(type(kernel), "problem", Kernel.problem) is Kernel.problem


class KernelMemo(Generic[C]):
    """Memoises a selector's answers by op id and call."""

    def __init__(self, selector: ConfigSelectorChain[C]) -> None:
        self._selector = selector
        self._answers: Final = Answers()
        self._pack: Pack | None = None
        MEMO.register(self._answers)

    def choose(self, inv: Invocation[C, Any], kernel: Kernel[C, Any]) -> tuple[C, Session | None]:
        """Return the configuration of a call and, while candidates are tried in calls, the session that runs it."""
        found = self.find(inv, kernel)
        if found is not None:
            return found, None
        selection = self._ask(inv, kernel)
        return selection.config, selection.exploration

    def find(self, inv: Any, kernel: Any) -> C | None:
        """Return the memoised configuration, after telling the listeners; None if the tiers have to be asked.

        Also for the invocations and kernels of a library whose names are the same: they need not be converted.
        """
        key = self._key(inv, kernel)
        # Only where nothing is scoped: an overlay or a policy of this thread or task may change the answer.
        answer = None if key is None or INNERMOST.get() is not None else self._answers.known.get(key)
        if answer is None or (MEMO.suspended and recordings()):
            return None
        if answer.tell is not None:
            answer.tell()
        return answer.config  # type: ignore[no-any-return]

    def _key(self, inv: Any, kernel: Any) -> Hashable | None:
        """Return the key of a call, or None if an argument has no cheap key; such a call goes the long way."""
        if not _is_keyed_by_arguments(inv, kernel):
            return None
        pack, args, kwargs = self._pack, inv.args, inv.kwargs
        values = (*args, *kwargs.values())
        named = kernel.op_id, kernel.version, len(args), *kwargs
        if pack is not None and (packed := pack(*values)) is not None:
            return *named, packed
        try:
            # Classes and enums are not packed, and most calls have one or two beside twenty values that are.
            parts = [(pack and pack(x)) or fast_key_of(x) for x in values]
            key = *named, *parts
            hash(key)
        except (TypeError, AttributeError, RuntimeError):
            return None
        return key

    def _ask(self, inv: Invocation[C, Any], kernel: Kernel[C, Any]) -> Selection[C]:
        """Ask the tiers, and memoise their answer for calls of the same kind."""
        epoch = MEMO.epoch
        if accelerator_wanted():
            self._pack = find_pack(layout=True)  # the arguments may come from a library that was loaded just now
        key = self._key(inv, kernel)
        problem = None if key is None else self._answers.problems.get(key)
        selection = self._selector.select(inv, kernel, problem)
        if key is None:
            return selection
        lasting = not selection.transient and selection.exploration is None
        if lasting and INNERMOST.get() is None and not recordings():
            answer = memoised_answer(selection, self._selector.listeners)
            MEMO.remember(self._answers, selection.problem, key, answer, epoch=epoch)
        if problem is None:
            MEMO.note(self._answers, key, selection.problem)
        return selection
