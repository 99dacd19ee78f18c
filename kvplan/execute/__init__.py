"""Executors: plans in, moved bytes out. One file a path."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any, Self

from kvplan.errors import KVPlanError, LayoutError, PathError
from kvplan.execute.host import HostPath
from kvplan.execute.policy import PATHS, Policy
from kvplan.execute.transfer import Transfer, TransferResult, check_after
from kvplan.plan import Plan

__all__ = ["PATHS", "Executor", "Policy", "Transfer", "TransferResult"]


class Executor:
    """Moves the bytes of plans, asynchronously, in the order of their submits.

    Args:
        device: ``"cpu"``: the host path, CPU memory to CPU memory.
        policy: which path to take, and with how many threads.

    Raises:
        PathError: a device or path that this executor does not serve, with the reason; or a policy that is none.

    Several threads may submit at once. Transfers of one executor run one after another, as on a CUDA stream: what one
    waits for (``after=``) holds up those behind it.

    What was submitted is finished, too, when an executor is dropped without :meth:`close` (behind the caller's back:
    dropping never blocks) and when the interpreter exits. The exit waits for copying to end, however long, but not
    for what never comes: once nothing is copied and all that is left has waited for its ``after=`` for 5 seconds, that
    is given up with a RuntimeWarning. An executor does not survive a fork; the child makes its own.

    >>> import kvplan, numpy as np
    >>> a, b = np.arange(512, dtype=np.int8).reshape(8, 4, 16), np.zeros((8, 4, 16), np.int8)
    >>> program = kvplan.compile(*(kvplan.KVLayout.from_tensors("block token dim", t) for t in (a, b)))
    >>> with Executor() as executor:
    ...     result = executor.submit(program.plan([3, 1], [0, 7])).result()
    >>> result.nbytes, result.path, bool((b[0] == a[3]).all() and (b[7] == a[1]).all())
    (128, 'host', True)
    """

    def __init__(self, device: str = "cpu", policy: Policy | None = None) -> None:
        self.device = str(device)
        if policy is not None and not isinstance(policy, Policy):
            raise PathError(f"policy is {policy!r}; give a kvplan.Policy, such as Policy(path='auto'), or None")
        self.policy = policy or Policy()
        if self.device != "cpu":
            reasons = "; ".join(f"{path}: {_why_not(path, self.device)}" for path in PATHS)
            raise PathError(f"no path serves device {self.device!r}: {reasons}")
        if self.policy.path not in ("auto", "host"):
            raise PathError(f"path {self.policy.path!r} cannot serve device 'cpu': {_why_not(self.policy.path, 'cpu')}")
        host = HostPath(self.policy.threads)
        self._host = host
        # Runs wherever the last reference goes, in any thread and in any collection of garbage: it must not block.
        weakref.finalize(self, host.stop).atexit = False  # exits are host.py's: they wait

    def submit(self, plan: Plan, after: Any = None) -> Transfer:
        """Queue a plan and return at once.

        Args:
            plan: what to move.
            after: a stream, an event, a Transfer, or None: begin only when it has passed.

        Raises:
            TransferError: the executor is closed, or was made before a fork, in the parent process.
            KVPlanError: what is not a plan, or an ``after`` that cannot be waited for.
            LayoutError: a destination that is read-only, or addresses that are virtual.
            PathError: the plan is not for this path.
        """
        self._host.check_open()
        if not isinstance(plan, Plan):
            raise KVPlanError(f"plan is a {type(plan).__name__}; submit takes what CopyProgram.plan or join made")
        check_after(after)
        for src, dst in plan.layouts:
            for layout in (src, dst):
                if layout.virtual:
                    raise LayoutError(f"the addresses of {layout!r} are virtual (from a spec); nothing can be moved")
            if not dst.writable:
                raise LayoutError(f"the destination {dst!r} holds a read-only array; pass a writable one")
        return self._host.submit(plan, after)

    def close(self) -> None:
        """Finish all transfers in flight, then stop.

        Closing twice is fine, also from two threads at once: each returns when all is finished. In a forked child there
        is nothing to finish; the parent does.
        """
        self._host.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _why_not(path: str, device: str) -> str:
    if device == "cpu":
        return "is for GPU memory; the CPU has the host path"
    if path == "host":
        return "copies between CPU memories only"
    return "is not part of this release"
