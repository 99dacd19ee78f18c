"""The executor. It checks a plan and its options, and passes them to the host path or to the backend of a GPU."""

from __future__ import annotations

import logging
import re
import sys
import weakref
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

from kvplan.base.values import optional_integer
from kvplan.cost.policy import Policy
from kvplan.cuda.handles import lender
from kvplan.errors import KVPlanError, PathError, TransferError
from kvplan.execute.stats import ExecutorStats
from kvplan.execute.transfer import LayerwiseTransfer, Transfer, check_after
from kvplan.layout.tensors import check_held
from kvplan.plan.plan import Plan

if TYPE_CHECKING:
    from kvplan.cost.model import Candidate
    from kvplan.cost.profile import DeviceProfile
    from kvplan.execute.gpu.backend import GpuBackend
    from kvplan.execute.host import HostPath

log = logging.getLogger("kvplan.execute")
PRIORITIES = ("normal", "high")


class Executor:
    """An object that moves the bytes of plans, asynchronously.

    Args:
        device: ``"cpu"`` copies between CPU memories. ``"cuda:0"``, ``"cuda"`` (torch's current device) or a
            ``torch.device`` copies between that GPU and host memory, within the GPU, and between it and other GPUs.
        policy: the path to take, and its limits; by default ``Policy()``.
        profile: measured costs of the device's paths. By default the profile that ``kvplan calibrate`` made on this
            machine; else the profile that kvplan ships for this GPU; else a guess.
        kernel_stream: an idle stream of the caller for all kernels of a GPU's executor, or a function that returns one
            or None, and that the first kernel calls. By default the executor makes streams of its own.

    Raises:
        PathError: no path, or not the policy's path, serves the device; ``policy`` or ``profile`` has a wrong type;
            ``kernel_stream`` is no stream; or this Python runs without the GIL.

    Several threads may submit at once. Transfers of one direction run in the order of their submits, as on a CUDA
    stream: a transfer that waits for its ``after=`` delays the transfers behind it. A GPU's loads, its stores, and its
    copies from GPU memory to GPU memory do not wait for each other. A load of bytes that a store writes must name it:
    ``after=store``. So must a copy of blocks that a load writes: ``after=load``.

    A GPU executor takes the path that the device's profile predicts to be the cheapest for a plan, unless the policy
    names one (``docs/ideas/cost-model.md``). :meth:`candidates` returns the predicted costs. The copy engine moves
    pageable memory, and memory of GPUs that cannot reach each other.

    If two streams besides the default one have launched kernels, the kernels of CUDA graphs start 0.2 us later until
    the process ends (driver 580). ``kernel_stream`` avoids that (``docs/guides/gpu.md``, Streams): an engine that
    replays its graphs on a stream of its own gives the default stream. Kernels of loads and stores then run one after
    another.

    Between two GPUs, either GPU can do the work: the executor of the source's GPU pushes, and the executor of the
    destination's GPU pulls (``docs/guides/gpu.md``).

    Submitted transfers also finish if the executor is garbage-collected without :meth:`close`, or when the interpreter
    exits. Garbage collection never blocks. The exit waits at most 15 seconds for all executors, and warns of
    transfers that it gives up. A forked child must make its own executor.

    >>> import kvplan, numpy as np
    >>> a, b = np.arange(512, dtype=np.int8).reshape(8, 4, 16), np.zeros((8, 4, 16), np.int8)
    >>> program = kvplan.compile(*(kvplan.KVLayout.from_tensors("block token dim", t) for t in (a, b)))
    >>> with Executor() as executor:
    ...     result = executor.submit(program.plan([3, 1], [0, 7])).result()
    >>> result.nbytes, result.path, bool((b[0] == a[3]).all() and (b[7] == a[1]).all())
    (128, 'host', True)
    """

    def __init__(
        self,
        device: Any = "cpu",
        policy: Policy | None = None,
        profile: DeviceProfile | None = None,
        *,
        kernel_stream: Any = None,
    ) -> None:
        if not getattr(sys, "_is_gil_enabled", lambda: True)():  # of CPython 3.13 and later
            raise PathError("this Python runs without the GIL, and executors need it; run a build that has it")
        if policy is not None and not isinstance(policy, Policy):
            raise PathError(f"policy is {policy!r}; give a kvplan.Policy, such as Policy(path='auto'), or None")
        if profile is not None and not hasattr(profile, "costs"):
            raise PathError(f"profile is {profile!r}; give a kvplan.cost.profile.DeviceProfile, or None")
        self.policy = policy or Policy()
        self.device = _device_name(device)
        self._backend = _backend(self.device, self.policy, profile, kernel_stream)
        self._submit = self._backend.submit
        # The finalizer may run in any thread and in any garbage collection, so it must not block.
        weakref.finalize(self, self._backend.stop).atexit = False  # the backend has its own exit hook, which waits
        log.info("executor of %s, path %s", self.device, self.policy.path, extra={"kvplan_device": self.device})

    def prepare(self, plan: Plan | None = None, *, by_layer: bool = False) -> None:
        """Warm up for plans like this one, so that the first submit need not wait. It moves nothing.

        Call it at engine start. It compiles the CPU loops, and the kernels of every path that plans of the same
        programs may take, of any size. Or it loads them from the caches of numba and Triton. Without caches, as in a
        new container, this takes seconds. It uploads run tables. :meth:`close` waits for its end.

        The first transfers still make the tables and kernels of short ``by_layer`` transfers, which are cut into fewer
        groups of layers.

        Args:
            plan: any plan of the programs to warm up, such as ``program.plan([0], [0])``; None to load only the loops.
            by_layer: whether transfers will be submitted ``by_layer``.

        Raises:
            KVPlanError: ``plan`` is not a plan, or :meth:`submit` would raise an error for it.
            LayoutError: a tensor has other memory than when it was described. Submits do not look: see
                :func:`kvplan.compile`.

        >>> import kvplan, numpy as np
        >>> layout = kvplan.KVLayout.from_tensors("block token dim", np.zeros((8, 4, 16), np.int8))
        >>> with Executor() as executor:
        ...     executor.prepare(kvplan.compile(layout, layout).plan([0], [1]))
        ...     executor.stats().transfers
        0
        """
        if plan is not None:
            _check(plan)
            for layout in chain.from_iterable(plan.layouts):
                check_held(layout, layout.holdings)
        self._backend.prepare(plan, by_layer=by_layer)

    def submit(
        self, plan: Plan, after: Any = None, *, by_layer: bool = False, priority: str = "normal",
    ) -> Transfer:  # fmt: skip
        """Queue a plan and return at once.

        Args:
            plan: the plan whose bytes to move.
            after: a stream, an event, a Transfer, or None: the transfer begins when this has completed. Of a stream,
                only work that was launched before the submit counts.
            by_layer: whether to move layers in their order, so that :meth:`Transfer.wait_layer` can wait for one layer.
                Long transfers are cut into groups of layers, at most 10; those at both ends are the shortest. A
                wait for a layer is for its whole group.
            priority: ``"high"`` lets the transfer overtake ``"normal"`` transfers that have not begun, also those that
                touch the same bytes: name a transfer that it must follow with ``after``. High transfers keep the order
                of their submits. On a CPU, a normal transfer that has begun pauses for a high one.

        While ``after``, or torch's current stream by default, is captured into a CUDA graph, submits are refused.

        Raises:
            TransferError: the executor is closed, or belongs to the parent process of a fork; ``after`` is a transfer
                that failed; a thread cannot be started; a signal handler or a finalizer called this within another call
                of the executor; or a driver call fails; the message names call and code.
            KVPlanError: ``plan`` is not a plan, ``after`` cannot be waited for, or ``priority`` is unknown.
            LayoutError: the destination is read-only, or addresses are not this process's.
            HostMemoryError: memory is pageable, and the path needs pinned memory.
            PathError: the policy's path, or every path, cannot serve the plan; or a CUDA graph is being captured.

        >>> import kvplan, numpy as np
        >>> layout = kvplan.KVLayout.from_tensors("layer block token dim", np.zeros((2, 8, 4, 16), np.int8))
        >>> with Executor() as executor:
        ...     transfer = executor.submit(kvplan.compile(layout, layout).plan([0], [5]), by_layer=True)
        ...     transfer.wait_layer(0)
        """
        if not isinstance(plan, Plan) or priority not in PRIORITIES:
            _check(plan, priority)
        if after is not None:
            check_after(after, gpu=self.device != "cpu")
        if log.isEnabledFor(logging.DEBUG):
            log.debug("submit %r, priority %s", plan, priority, extra={"kvplan_nbytes": plan.nbytes})
        return self._submit(plan, after, by_layer=by_layer, urgent=priority == "high")

    def begin(self, plan: Plan, *, groups: int | None = None, priority: str = "normal") -> LayerwiseTransfer:
        """Begin a transfer whose layers are submitted one by one, such as a store while the model computes.

        It moves nothing yet. Each :meth:`LayerwiseTransfer.submit` queues one layer behind the stream that writes it.
        The transfer has one end, and :meth:`stats` counts each group of layers.

        Args:
            plan: the plan of all layers.
            groups: maximum number of submits; neighbouring layers then move together. By default each layer has its
                own. A plan whose layers cannot move apart is moved with its last layer.
            priority: as in :meth:`submit`.

        Raises:
            TransferError: the executor is closed, or belongs to the parent process of a fork.
            KVPlanError: ``plan`` is not a plan or has no layers, ``groups`` is not a positive integer, or ``priority``
                is unknown.

        >>> import kvplan, numpy as np
        >>> layout = kvplan.KVLayout.from_tensors("layer block token dim", np.zeros((2, 8, 4, 16), np.int8))
        >>> with Executor() as executor:
        ...     store = executor.begin(kvplan.compile(layout, layout).plan([0], [5]))
        ...     for layer in (0, 1):
        ...         store.submit(layer)
        ...     store.synchronize()
        """
        self._backend.check_open()
        _check(plan, priority)
        if not plan.layers:
            raise KVPlanError(f"{plan!r} has no layers; submit it as a whole")
        count = optional_integer("groups", groups, least=1, error=KVPlanError)
        submit = partial(self.submit, priority=priority)
        return LayerwiseTransfer(plan, len(plan.layers) if count is None else count, submit, self.prepare)

    def candidates(self, plan: Plan, *, by_layer: bool = False) -> list[Candidate]:
        """Return each path with its predicted cost for a plan: first the path that ``auto`` takes, last unusable paths.

        No bytes are moved. :func:`kvplan.cost.explain.explain` formats the list as text.

        Args:
            plan: the plan.
            by_layer: whether the plan would be submitted ``by_layer``. The transfer is then cut into groups of layers,
                which have more and shorter copies, so another path may be the cheapest.

        Raises:
            KVPlanError: ``plan`` is not a plan.
            LayoutError: the destination is read-only, or addresses are not this process's.
            PathError: this is a CPU executor, which has no cost model.

        >>> import kvplan, numpy as np
        >>> layout = kvplan.KVLayout.from_tensors("layer block token dim", np.zeros((2, 8, 4, 16), np.int8))
        >>> with Executor() as executor:
        ...     try:
        ...         executor.candidates(kvplan.compile(layout, layout).plan([0], [5]), by_layer=True)
        ...     except kvplan.PathError as error:
        ...         print(error)
        Plan(host of 1 units, 128 bytes) has one path on the CPU, 'host', and no cost model; give an executor of a GPU
        """
        _check(plan)
        return self._backend.candidates_of(plan, by_layer=by_layer)

    def stats(self) -> ExecutorStats:
        """Return the sums of transfers, bytes, seconds and descriptors so far, by path, and the error of predictions.

        A transfer counts when the executor notices its end: at most about 0.1 s later, or when a caller checks it.

        >>> with Executor() as executor:
        ...     executor.stats().transfers, executor.stats().prediction_error
        (0, None)
        """
        gpu, pinned = self._backend.held()
        sums = self._backend.tally.stats()
        return replace(sums, in_flight=self._backend.in_flight(), gpu_nbytes=gpu, pinned_nbytes=pinned)

    def close(self) -> None:
        """Wait until all submitted transfers have finished, then stop.

        It may be called twice, also by two threads at once: each call returns when all transfers are finished. In a
        forked child it does nothing, because the transfers belong to the parent.
        """
        self._backend.close()
        log.info("executor of %s closed", self.device, extra={"kvplan_device": self.device})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _check(plan: Any, priority: Any = PRIORITIES[0]) -> None:
    if not isinstance(plan, Plan):
        raise KVPlanError(f"plan is a {type(plan).__name__}; give what CopyProgram.plan or join made")
    if priority not in PRIORITIES:
        raise KVPlanError(f"priority is {priority!r}; give 'high' or 'normal'")


def _device_name(device: Any) -> str:
    name = str(device)
    if name == "cpu" or re.fullmatch(r"cuda:\d+", name):
        return name
    if name == "cuda":
        torch = sys.modules.get("torch")
        return f"cuda:{torch.cuda.current_device() if torch is not None and torch.cuda.is_available() else 0}"
    raise PathError(f"no path serves device {name!r}: host serves 'cpu', and all others serve 'cuda:N'")


def _backend(device: str, policy: Policy, profile: DeviceProfile | None, kernel_stream: Any) -> HostPath | GpuBackend:
    if device == "cpu":
        if kernel_stream is not None:
            raise PathError(f"kernel_stream is {kernel_stream!r}, and device 'cpu' runs no kernels; leave it out")
        if policy.path not in ("auto", "host"):
            raise PathError(f"path {policy.path!r} cannot serve device 'cpu', whose only path is 'host'")
        from kvplan.execute.host import HostPath

        return HostPath(policy.threads)
    if policy.path == "host":
        raise PathError(f"path 'host' cannot serve device {device!r}: it copies between CPU memories only")
    from kvplan.cuda.device import Device
    from kvplan.execute.gpu.backend import GpuBackend

    try:
        return GpuBackend(Device(int(device.removeprefix("cuda:"))), policy, profile, lent=lender(kernel_stream))
    except TransferError as error:
        wanted = "no path serves" if policy.path == "auto" else f"path {policy.path!r} cannot serve"
        raise PathError(f"{wanted} device {device!r}: {error}") from None
