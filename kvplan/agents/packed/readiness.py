"""Ask whether the object that a submit named with ``after=`` has completed, without blocking."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvplan.errors import KVPlanError, TransferError
from kvplan.execute.transfer import Transfer, call_when_done, check_after
from kvplan.plan.plan import Plan

_HANDLES = ("cuda_stream", "__cuda_stream__")


class Ready:
    """An ``after=``, asked at every poll.

    A transfer, an event of torch, and a ``threading.Event`` are asked. A stream of torch is asked through an event that
    is recorded now. Any other object that only blocks gets a thread of its own. A stream that records no event is left
    to the executor, as :attr:`left`.

    Args:
        after: a stream, an event, a Transfer, or None.

    Raises:
        KVPlanError: an event of CUDA was never recorded: it would count as passed.

    Attributes:
        left: what the executor must wait for instead, or None.

    >>> import threading
    >>> event = threading.Event()
    >>> ready = Ready(event)
    >>> ready(), event.set(), ready(), Ready(None)()
    (False, None, True, True)
    """

    def __init__(self, after: Any) -> None:
        self.left: Any = None
        self._after = after
        self._ask: Callable[[], Any] | None = None
        self._ends: list[BaseException | None] = []  # of an object that only blocks
        if after is None:
            return
        if getattr(after, "cuda_event", None) == 0:
            raise KVPlanError(
                "after= has an event that was never recorded, and CUDA takes it for passed; record it first"
            )
        if hasattr(after, "record_event"):
            after = after.record_event()
        for name in ("done", "query", "is_set"):
            ask = getattr(after, name, None)
            if callable(ask):
                self._ask = ask
                break
        else:
            if any(hasattr(after, name) for name in _HANDLES):
                self.left = after
            else:
                self._ask = lambda: bool(self._ends)
                call_when_done(after, self._ends.append, set())

    def __call__(self) -> bool:
        """Return whether it has completed; raise the error of a transfer that failed."""
        if self._ask is None:
            return True
        if not self._ask():
            return False
        after, self._after, self._ask = self._after, None, None  # so that a chain of transfers does not stay alive
        if isinstance(after, Transfer):
            after.synchronize()
        if self._ends and self._ends[0] is not None:
            raise self._ends[0]
        return True

    def completed(self) -> bool:
        """Return whether it has completed; raise TransferError if it failed."""
        try:
            return self()
        except Exception as error:
            raise TransferError(f"its after= failed ({error})") from error

    @classmethod
    def of_all(cls, every: Sequence[Ready]) -> Ready:
        """Return what has completed once all of them have; raise KVPlanError if the executor must wait for several."""
        asked = [one for one in every if one._ask is not None]
        left = [one.left for one in every if one.left is not None]
        if len(left) > 1:
            raise KVPlanError(f"after has {len(left)} objects that cannot be asked whether they are done; give events")
        made = cls(None)
        made.left = left[0] if left else None
        if asked:
            made._ask = lambda: all(one() for one in asked)
        return made


def gates_of(plan: Plan, layers: Sequence[frozenset[int]], after: Any) -> list[Ready]:
    """Return what each group of layers waits for, from the ``after=`` of a submit.

    Args:
        plan: the plan.
        layers: the layers of each group.
        after: one object, for all groups; or one for each of some layers.

    Raises:
        KVPlanError: it cannot be waited for, or names layers that the plan does not move.
    """
    every = list(after.values()) if isinstance(after, Mapping) else [after]
    for one in every:
        if one is not None:
            check_after(one, gpu=True)
    if not isinstance(after, Mapping):
        gates = [Ready(after), *(Ready(None) for _ in layers[1:])]
        for gate in gates[1:]:
            gate.left = gates[0].left
        return gates
    if strange := sorted(set(after) - set(plan.layers), key=str):
        raise KVPlanError(f"after has layers {strange}, which {plan!r} does not move")
    return [Ready.of_all([Ready(after[layer]) for layer in sorted(some & after.keys())]) for some in layers]
