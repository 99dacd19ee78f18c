"""A transfer in flight, and what is known of it afterwards."""

from __future__ import annotations

import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from kvplan.base.integers import integer
from kvplan.base.latch import Wake, sleep, waking
from kvplan.base.numbers import number_ranges
from kvplan.base.process import check_process
from kvplan.errors import KVPlanError, LayoutError, PathError, TransferError
from kvplan.layout.components import NOT_HERE
from kvplan.layout.holding import check_held
from kvplan.plan.layers import layers_of
from kvplan.plan.plan import Plan

if TYPE_CHECKING:
    from kvplan.execute.host.path import HostPath
    from kvplan.layout.kvlayout import KVLayout


ASKED = 2  # programs of joined plans that are all asked about their memory, which takes 0.3 us each
_turns = count()  # which of several is asked next


class _Result(NamedTuple):
    nbytes: int
    seconds: float
    path: str
    descriptors: int
    launches: int


class TransferResult(_Result):
    """What a finished transfer did.

    Attributes:
        nbytes: bytes moved.
        seconds: from the start of the copying to its end; waiting in line and loading compiled loops not counted.
        path: the path that moved them.
        descriptors: contiguous copies issued.
        launches: calls that issued them: driver calls, kernel launches, or tasks of the host path.
        predicted: what the cost model expected of ``seconds``, from the device's profile; None where it has no model:
            on the CPU, and within a GPU. Not one of the tuple's five.

    >>> nbytes, seconds, path, descriptors, launches = made = TransferResult(4096, 1e-5, "kernel", 2, 1, predicted=2e-5)
    >>> seconds, made.predicted
    (1e-05, 2e-05)
    """

    predicted: float | None

    def __new__(
        cls, nbytes: int, seconds: float, path: str, descriptors: int, launches: int, predicted: float | None = None
    ) -> Self:
        """Five of a tuple, and what was predicted."""
        self = super().__new__(cls, nbytes, seconds, path, descriptors, launches)
        self.predicted = predicted
        return self


class Transfer(ABC):
    """A submitted plan. Keeps the plan, and with it all memory it touches, alive until it is done.

    Made by :meth:`kvplan.Executor.submit`.

    Attributes:
        plan: what it moves.

    >>> import kvplan, numpy as np
    >>> layout = kvplan.KVLayout.from_tensors("block token dim", np.zeros((8, 4, 16), np.int8))
    >>> with kvplan.Executor() as executor:
    ...     transfer = executor.submit(kvplan.compile(layout, layout).plan([0, 1], [5, 6]))
    >>> transfer.done(), transfer.result().nbytes
    (True, 128)
    """

    plan: Plan

    @abstractmethod
    def done(self) -> bool:
        """Whether it has finished, well or not; never blocks."""

    @abstractmethod
    def wait(self, stream: Any = None) -> None:
        """Order what follows on ``stream`` after this transfer.

        On a GPU this is a wait of the stream, and returns at once; the CPU waits only for a transfer that the
        executor's own thread has not yet issued: one with an ``after=`` that is no CUDA object, pageable memory, or
        thousands of descriptors for the copy engine.

        The host path has no streams: its bytes must be there before anybody goes on, so this waits for them, whatever
        the stream.

        Args:
            stream: a stream of torch, or of anything with ``cuda_stream`` or ``__cuda_stream__``; by default torch's
                current stream.

        Raises:
            TransferError: the transfer failed.
        """

    @abstractmethod
    def wait_layer(self, layer: int, stream: Any = None) -> None:
        """Order what follows on ``stream`` after the bytes of one layer, of a transfer submitted ``by_layer``.

        Args:
            layer: its global number.
            stream: as in :meth:`wait`.

        Raises:
            LayoutError: a layer that the plan does not move.
            TransferError: the transfer failed.
        """

    @abstractmethod
    def synchronize(self, timeout: float | None = None) -> None:
        """Block the calling thread until the transfer has finished.

        Args:
            timeout: seconds to wait at most.

        Raises:
            TransferError: the transfer failed, or has not finished in time (and goes on).
        """

    @abstractmethod
    def result(self) -> TransferResult:
        """What it did; waits for it.

        Raises:
            TransferError: the transfer failed.
        """

    def cancel(self) -> bool:
        """Take it back if it has not begun: if it waits for its ``after=`` on the CPU, or behind others that do.

        One that was cancelled has touched no byte; those behind it go on. It is done, and whoever waits for it, or has
        named it as ``after=``, gets a TransferError that says so.

        Returns:
            Whether it will not run. False: it has begun or ended, and goes on as if nothing had been asked.

        Raises:
            TransferError: it is part of a CUDA graph.
        """
        return False

    def replan(self, plan: Plan) -> None:
        """Give a transfer that was captured into a CUDA graph other blocks to move, from the next replay on.

        No replay may be in flight. Only transfers of the kernel path can be captured.

        Args:
            plan: of the same programs, with at most as many units of each as were captured.

        Raises:
            PathError: the transfer was not captured, or the plan does not fit what was.
        """
        del plan
        raise PathError("only a transfer captured into a CUDA graph is replayed with another plan; submit this one")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.plan!r})"


def check_layouts(plan: Plan) -> None:
    """Both sides can be moved.

    Of each side one tensor is asked whether it still has its memory: :func:`kvplan.layout.holding.questions`. Of more
    than two programs whose plans were joined, one is asked in its turn.

    Raises:
        LayoutError: a destination that is read-only, addresses that are not this process's, or a tensor that was found
            to have other memory than when it was described.
    """
    programs = plan.programs
    if len(programs) > ASKED:
        programs = (programs[next(_turns) % len(programs)],)
    elif len(programs) == 1 == len(plan.layouts) and programs[0].ready():  # of most submits this is all
        return
    for src, dst in plan.layouts:
        if src.addresses != "memory" or dst.addresses != "memory" or not dst.writable:
            raise _immovable(src, dst)
    for program in programs:
        if not program.ready():
            check_held(program.src, program.src.holdings)
            check_held(program.dst, program.dst.holdings)


def _immovable(src: KVLayout, dst: KVLayout) -> LayoutError:
    for layout in (src, dst):
        if layout.addresses != "memory":
            return LayoutError(f"the addresses of {layout!r} are {NOT_HERE[layout.addresses]}; nothing can be moved")
    return LayoutError(f"the destination {dst!r} holds a read-only array; pass a writable one")


def check_layer(plan: Plan, layer: Any) -> int:
    """The global number of a layer, which the plan moves.

    Raises:
        LayoutError: it does not, or that is no number.
    """
    moved = layers_of(plan)
    number = integer("layer", layer)
    if number not in moved:
        raise LayoutError(f"layer {number} is not moved by {plan!r}; its layers are {number_ranges(moved)}")
    return number


class StreamlessTransfer(Transfer):
    """A transfer that no stream waits for: whoever goes on after it waits on the CPU, for all of it."""

    _result: TransferResult | None

    def wait(self, stream: Any = None) -> None:
        """See :meth:`Transfer.wait`; the CPU waits, whatever the stream."""
        del stream
        self.synchronize()

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        """See :meth:`Transfer.wait_layer`; waits for all layers."""
        check_layer(self.plan, layer)
        self.wait(stream)

    def result(self) -> TransferResult:
        """See :meth:`Transfer.result`."""
        self.synchronize()
        if self._result is None:
            raise TransferError("the transfer finished without a result")
        return self._result


CLOSED_ERROR = "the executor is closed; submit before close()"
BEGUN = object()  # the fate of a transfer that its runner has begun


class HostTransfer(StreamlessTransfer):
    """A transfer of the host path.

    Attributes:
        after: what it waits for, until it begins.
        urgent: whether it is of high priority.
        behind: transfers that it waits for, since their bytes conflict; known when it is dealt out to its runner.
        fates: :data:`BEGUN`, or something else of whoever takes it back; the first entry decides.
        sleepers: those who wait for its end.
    """

    behind: Sequence[HostTransfer] = ()
    _over = False
    _result: TransferResult | None = None
    _error: BaseException | None = None

    def __init__(self, plan: Plan, path: HostPath, after: Any = None, *, urgent: bool = False) -> None:
        self.plan = plan
        self.after = after
        self.urgent = urgent
        self._path = path
        self.fates: list[object] = []
        self.sleepers: list[Wake] = []

    @property
    def cancelled(self) -> bool:
        """Whether it was taken back before it began."""
        fates = self.fates
        return bool(fates) and fates[0] is not BEGUN

    def done(self) -> bool:
        """See :meth:`Transfer.done`."""
        return self._over or self.cancelled

    def synchronize(self, timeout: float | None = None) -> None:
        """See :meth:`Transfer.synchronize`."""
        if not self._over:
            check_process(self._path.generation)  # in a fork's child, nobody would end it
            if not sleep(self.done, self.sleepers, timeout):
                raise TransferError(f"transfer of {self.plan.nbytes} bytes has not finished within {timeout} seconds")
        if self.cancelled:
            raise TransferError(cancellation(self.plan))
        if self._error is not None:
            raise TransferError(f"transfer of {self.plan.nbytes} bytes failed: {self._error}") from self._error

    def cancel(self) -> bool:
        """See :meth:`Transfer.cancel`."""
        return self._path.cancel(self)

    def begin(self) -> bool:
        """Its runner begins it; False where it was taken back."""
        self.fates.append(BEGUN)
        return self.fates[0] is BEGUN

    def finish(self, result: TransferResult | None, error: BaseException | None = None) -> None:
        """It has ended, in its runner's thread."""
        self._result, self._error = result, error
        self._over = True
        any(waking(self.sleepers))

    def __repr__(self) -> str:
        ended = "cancelled" if self.cancelled else "failed" if self._error else "done"
        return f"Transfer({self.plan!r}, {ended if self.done() else 'in flight'})"


def cancellation(plan: Plan) -> str:
    """What is said of a transfer that was cancelled."""
    return f"transfer of {plan.nbytes} bytes was cancelled before it began; nothing was moved"


def wait_for(after: Any) -> None:
    """Block until what a submit named with ``after=`` has happened.

    Raises:
        TransferError: it was a transfer, and it failed.
    """
    if after is None:
        return
    if hasattr(after, "synchronize"):
        after.synchronize()
    else:
        after.wait()


def check_after(after: Any, *, gpu: bool = False) -> None:
    """``after`` is None, a transfer, or a stream or event; for a GPU, also what only has a stream's or event's handle.

    Raises:
        KVPlanError: it is none of those, or is waited for with ``await``, as an event of asyncio is.
    """
    handles = ("cuda_stream", "cuda_event", "__cuda_stream__")
    if after is None or (gpu and any(hasattr(after, name) for name in handles)):
        return
    method = getattr(after, "synchronize", getattr(after, "wait", None))
    kind = f"{type(after).__module__}.{type(after).__qualname__}"
    if not callable(method):
        raise KVPlanError(f"after is a {kind}; give a stream, an event, a Transfer or None")
    if inspect.iscoroutinefunction(method):
        raise KVPlanError(
            f"after is a {kind}, which must be awaited; await it before submit, or give a threading.Event"
        )


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def seconds(self) -> float:
        """Seconds since then."""
        return time.perf_counter() - self._start
