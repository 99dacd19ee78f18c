"""Executors: plans in, moved bytes out."""

from __future__ import annotations

import logging
import re
import sys
import weakref
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from kvplan.cost.policy import GPU_PATHS, PATHS, Policy
from kvplan.errors import KVPlanError, PathError, TransferError
from kvplan.execute.host.path import HostPath
from kvplan.execute.ranges import ranged
from kvplan.execute.stats import ExecutorStats, Tally
from kvplan.execute.transfer import Transfer, check_after
from kvplan.plan.plan import Plan

if TYPE_CHECKING:
    from kvplan.cost.model import Candidate
    from kvplan.cost.profile import DeviceProfile

log = logging.getLogger("kvplan.execute")
PRIORITIES = ("normal", "high")


class _Backend(Protocol):
    """What moves the bytes: the host path, or a GPU's runtime."""

    tally: Tally

    def check_open(self) -> None: ...
    def prepare(self, plan: Plan | None, *, by_layer: bool) -> None: ...
    def submit(self, plan: Plan, after: Any, *, by_layer: bool, urgent: bool) -> Transfer: ...
    def candidates_of(self, plan: Plan) -> list[Candidate]: ...
    def in_flight(self) -> int: ...
    def own(self, executor: Executor) -> None: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...


class Executor:
    """Moves the bytes of plans, asynchronously.

    Args:
        device: ``"cpu"``: the host path, CPU memory to CPU memory. ``"cuda:0"``, ``"cuda"`` (torch's current device),
            or a ``torch.device``: between that GPU and host memory, and within it.
        policy: which path to take, and how.
        profile: what the device's paths cost; by default the one that ``kvplan calibrate`` made here, or that kvplan
            ships for this GPU, or a guess.

    Raises:
        PathError: a device or path that this executor does not serve, with the reason; or a policy that is none.
        TransferError: no thread can be started for it.

    Several threads may submit at once. Transfers of one direction run in the order of their submits, as on a CUDA
    stream: what one waits for (``after=``) holds up those behind it. A GPU's loads and stores do not hold each other
    up: a load of what a store writes names it, ``after=store``.

    A GPU executor takes the path that its device's profile makes the cheapest for a plan, unless the policy names one
    (``docs/cost-model.md``); :meth:`candidates` tells why. Pageable memory goes by the copy engine. Within a GPU, where
    nothing is measured, runs of 64 KiB or more do, too, and the rest goes by the kernel.

    What was submitted is finished, too, when an executor is dropped without :meth:`close` (behind the caller's back:
    dropping never blocks) and when the interpreter exits. The exit waits for copying to end, however long, but not
    for what never comes: once nothing is copied and all that is left has waited for its ``after=`` for 5 seconds, that
    is given up with a RuntimeWarning. For GPUs it waits 30 seconds in all. An executor does not survive a fork; the
    child makes its own.

    >>> import kvplan, numpy as np
    >>> a, b = np.arange(512, dtype=np.int8).reshape(8, 4, 16), np.zeros((8, 4, 16), np.int8)
    >>> program = kvplan.compile(*(kvplan.KVLayout.from_tensors("block token dim", t) for t in (a, b)))
    >>> with Executor() as executor:
    ...     result = executor.submit(program.plan([3, 1], [0, 7])).result()
    >>> result.nbytes, result.path, bool((b[0] == a[3]).all() and (b[7] == a[1]).all())
    (128, 'host', True)
    """

    def __init__(self, device: Any = "cpu", policy: Policy | None = None, profile: DeviceProfile | None = None) -> None:
        if policy is not None and not isinstance(policy, Policy):
            raise PathError(f"policy is {policy!r}; give a kvplan.Policy, such as Policy(path='auto'), or None")
        if profile is not None and not hasattr(profile, "costs"):
            raise PathError(
                f"profile is {profile!r}; give a kvplan.cost.profile.DeviceProfile, or None for this GPU's own"
            )
        self.policy = policy or Policy()
        self.device = _device_name(device)
        self._backend: _Backend = _backend(self.device, self.policy, profile)
        self._submit = ranged(self._backend.submit)
        # Runs wherever the last reference goes, in any thread and in any collection of garbage: it must not block.
        weakref.finalize(self, self._backend.stop).atexit = False  # exits are the backend's: they wait
        self._backend.own(self)  # a signal may break a finalizer off; then its thread sees for itself
        try:
            self._backend.start()  # behind that: a thread that runs can always be told to end
        except BaseException:
            self._backend.stop()
            raise
        log.info("executor of %s, path %s", self.device, self.policy.path, extra={"kvplan_device": self.device})

    def prepare(self, plan: Plan | None = None, *, by_layer: bool = False) -> None:
        """Do ahead what the first submit of such a plan would wait for; nothing is moved. For when an engine starts.

        Compiles the loops of planning and issuing and the kernels of every path that a plan of the same programs may
        take, of any size, or loads them from the caches of numba and Triton, and uploads run tables. Without those
        caches, as in a new container, that takes seconds; they would else be a serving engine's. A :meth:`close`
        meanwhile waits for it.

        Left to the first transfers are the ring's memory, tables and kernels of short transfers by layers (cut into
        fewer groups), and the kernel of joined plans of more than four run groups other than the one given, since it
        depends on their descriptors.

        Args:
            plan: any of the programs to come, such as ``program.plan([0], [0])``; None for the loops alone.
            by_layer: for transfers that are submitted so.

        Raises:
            KVPlanError: what is not a plan; and whatever :meth:`submit` of it would raise before anything moves.

        >>> import kvplan, numpy as np
        >>> layout = kvplan.KVLayout.from_tensors("block token dim", np.zeros((8, 4, 16), np.int8))
        >>> with Executor() as executor:
        ...     executor.prepare(kvplan.compile(layout, layout).plan([0], [1]))
        ...     executor.stats().transfers
        0
        """
        if plan is not None and not isinstance(plan, Plan):
            raise KVPlanError(f"plan is a {type(plan).__name__}; prepare takes what CopyProgram.plan or join made")
        self._backend.prepare(plan, by_layer=by_layer)

    def submit(self, plan: Plan, after: Any = None, *, by_layer: bool = False, priority: str = "normal") -> Transfer:
        """Queue a plan and return at once.

        Args:
            plan: what to move.
            after: a stream, an event, a Transfer, or None: begin only when it has passed. Of a stream, what it has
                been given so far.
            by_layer: move layers in their order, so that :meth:`Transfer.wait_layer` can wait for one. Long transfers
                are cut into at most 16 groups of layers; a wait is for the group that holds the layer.
            priority: ``"high"``: go past ``"normal"`` transfers that have not begun. High ones keep the order of their
                submits among themselves, and so do two of which one writes what the other reads or writes; of a GPU,
                two of one direction.

        In the capture of a CUDA graph (``after`` is a stream being captured, or None while torch's current stream is)
        the kernel path becomes part of the graph; wait for the transfer before the capture ends.

        Raises:
            TransferError: the executor is closed, or was made before a fork, in the parent process; ``after`` is a
                transfer that failed; no thread can be started that it needs; or the driver refuses a call, which is
                named with its code.
            KVPlanError: what is not a plan, an ``after`` that cannot be waited for, or a priority that is none.
            LayoutError: a destination that is read-only, or addresses that are not this process's.
            HostMemoryError: pageable memory, for a path that needs it pinned.
            PathError: the plan is not for this path, or for any; or it cannot be captured.

        >>> import kvplan, numpy as np
        >>> layout = kvplan.KVLayout.from_tensors("layer block token dim", np.zeros((2, 8, 4, 16), np.int8))
        >>> with Executor() as executor:
        ...     transfer = executor.submit(kvplan.compile(layout, layout).plan([0], [5]), by_layer=True)
        ...     transfer.wait_layer(0)
        """
        self._backend.check_open()
        if not isinstance(plan, Plan):
            raise KVPlanError(f"plan is a {type(plan).__name__}; submit takes what CopyProgram.plan or join made")
        if after is not None:
            check_after(after, gpu=self.device != "cpu")
        if priority not in PRIORITIES:
            raise KVPlanError(f"priority is {priority!r}; give 'high' or 'normal'")
        if log.isEnabledFor(logging.DEBUG):
            log.debug("submit %r, priority %s", plan, priority, extra={"kvplan_nbytes": plan.nbytes})
        return self._submit(plan, after, by_layer=by_layer, urgent=priority == "high")

    def candidates(self, plan: Plan) -> list[Candidate]:
        """What each path is expected to do to a plan: the one that ``auto`` takes first, those that cannot serve last.

        Nothing is moved. :func:`kvplan.cost.explain.explain` makes it a text.

        Raises:
            KVPlanError: what is not a plan.
            LayoutError: a destination that is read-only, or addresses that are not this process's.
            PathError: an executor of the CPU, or a plan within the GPU: nothing was measured of those.
        """
        if not isinstance(plan, Plan):
            raise KVPlanError(f"plan is a {type(plan).__name__}; candidates takes what CopyProgram.plan or join made")
        return self._backend.candidates_of(plan)

    def stats(self) -> ExecutorStats:
        """Transfers, bytes, seconds and descriptors so far, by path; and how far predictions were off.

        Of transfers that are known to have ended: each is within some 20 ms of its end, or when somebody asks.

        >>> with Executor() as executor:
        ...     executor.stats().transfers, executor.stats().prediction_error
        (0, None)
        """
        return replace(self._backend.tally.stats(), in_flight=self._backend.in_flight())

    def close(self) -> None:
        """Finish all transfers in flight, then stop.

        Closing twice is fine, also from two threads at once: each returns when all is finished. In a forked child there
        is nothing to finish; the parent does.
        """
        self._backend.close()
        log.info("executor of %s closed", self.device, extra={"kvplan_device": self.device})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _device_name(device: Any) -> str:
    name = str(device)
    if name == "cpu" or re.fullmatch(r"cuda:\d+", name):
        return name
    if name == "cuda":
        torch = sys.modules.get("torch")
        return f"cuda:{torch.cuda.current_device() if torch is not None and torch.cuda.is_available() else 0}"
    reasons = "; ".join(f"{path}: serves 'cpu'" if path == "host" else f"{path}: serves 'cuda:N'" for path in PATHS)
    raise PathError(f"no path serves device {name!r}: {reasons}")


def _backend(device: str, policy: Policy, profile: DeviceProfile | None) -> _Backend:
    if device == "cpu":
        if policy.path not in ("auto", "host"):
            raise PathError(
                f"path {policy.path!r} cannot serve device 'cpu': is for GPU memory; the CPU has the host path"
            )
        return HostPath(policy.threads)
    if policy.path == "host":
        raise PathError(f"path 'host' cannot serve device {device!r}: copies between CPU memories only")
    from kvplan.cuda.device import Device
    from kvplan.execute.gpu.backend import GpuBackend

    try:
        return GpuBackend(Device(int(device.removeprefix("cuda:"))), policy, profile)
    except TransferError as error:
        wanted = GPU_PATHS if policy.path == "auto" else (policy.path,)
        reasons = "; ".join(f"{path}: {error}" for path in wanted)
        raise PathError(f"no path serves device {device!r}: {reasons}") from error
