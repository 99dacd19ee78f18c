"""Transfers of a GPU: what is in flight, what it holds, and how it ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvplan.base.latch import Latch
from kvplan.base.process import generation
from kvplan.base.threads import aside
from kvplan.cuda.device import NOT_READY
from kvplan.errors import KVPlanError, TransferError
from kvplan.execute.transfer import Transfer, TransferResult, check_layer
from kvplan.plan.plan import Plan

if TYPE_CHECKING:
    from kvplan.execute.gpu.arena import Arena, Held, Piece
    from kvplan.execute.gpu.backend import Runtime
    from kvplan.execute.gpu.kernel_path import Launch


class DeviceTransfer(Transfer):
    """A transfer between a GPU and pinned or pageable memory, or within the GPU.

    The runtime holds it until its last event has passed, and then gives its events and slots back; from then on it
    is only what its user holds: plan and result. All that changes does so under the runtime's lock.
    """

    # What most transfers keep: a submit has better things to do than to set it.
    copies = launches = 0
    _after: Any = None  # the event it waits for, if that is somebody else's
    _begin = _end = 0
    _issued: Latch | None = None  # of one that the lane's own thread issues
    _job: Callable[[], None] | None = None  # what that thread is to do
    _begun = False  # the lane's own thread issues it, or has
    _cancelled = _over = _captured = False
    _unmarked = _mark = 0  # calls since the last event behind some of its calls, and that event
    _result: TransferResult | None = None
    _error: BaseException | None = None

    def __init__(self, plan: Plan, runtime: Runtime, path: str, predicted: float | None = None) -> None:
        self.plan = plan
        self.path = path
        self.predicted = predicted
        self._runtime = runtime
        self._borrowed: list[int] = []  # events to give back
        self._pieces: list[Held] = []  # memory to give back
        self._blockers: list[object] = []  # of those who block on the end event
        self._marks: list[tuple[frozenset[int], int]] = []  # layers, and the event behind their bytes
        self._launches: list[Launch] = []  # of a captured one
        self._steps: list[Plan] = []  # what it was cut into, which holds the run tables

    # What the paths use while they issue it.

    def slot(self, nbytes: int) -> Piece:
        """A pinned slot that is this transfer's until its end."""
        return self._take(self._runtime.slots, nbytes)

    def scratch(self, nbytes: int) -> Piece:
        """GPU memory that is this transfer's until its end."""
        return self._take(self._runtime.memory, nbytes)

    def _take(self, arena: Arena, nbytes: int) -> Piece:
        return arena.take(nbytes, self._pieces)

    def event(self) -> int:
        """An event that is this transfer's until its end."""
        events, borrowed = self._runtime.events, self._borrowed
        while True:
            if events:
                event = events[-1]
                del events[-1]  # from here to the end of append neither a signal nor another thread comes between
                borrowed.append(event)
                return event
            aside(self._runtime.make_event)

    def _issue_now(self) -> None:
        """The lane's own thread issues it."""
        job, self._job = self._job, None
        if job is not None:
            job()

    def _is_issued(self) -> None:
        """The lane's own thread has issued it, or passed it by."""
        if self._issued is not None:
            self._issued.set()

    @property
    def queued(self) -> bool:
        """Whether it waits to be issued by the lane's own thread."""
        return self._issued is not None and not self._issued.is_set()

    # The contract.

    def done(self) -> bool:
        """See :meth:`Transfer.done`."""
        self._check_not_captured("done()")
        if self._over:
            return True
        self._runtime.check_process()
        return not self.queued and self._runtime.poll(self)

    def wait(self, stream: Any = None) -> None:
        """See :meth:`Transfer.wait`."""
        self._order(self._runtime.stream_handle(stream), None)

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        """See :meth:`Transfer.wait_layer`."""
        number = check_layer(self.plan, layer)
        self._order(self._runtime.stream_handle(stream), number)

    def precede(self, stream: int) -> None:
        """Let a stream, by its handle, wait for the end of this transfer."""
        self._order(stream, None)

    def synchronize(self, timeout: float | None = None) -> None:
        """See :meth:`Transfer.synchronize`."""
        self._check_not_captured("synchronize()")
        started = time.monotonic()
        if not self._over:
            self._runtime.check_process()
        if self._issued is not None and not self._issued.wait(timeout):
            raise self._late(timeout)
        if not self._over:
            if timeout is None:
                self._runtime.block(self)
            else:
                while not self.done():
                    if time.monotonic() - started > timeout:
                        raise self._late(timeout)
                    time.sleep(20e-6)
        self._raise_error()

    def _late(self, timeout: float | None) -> TransferError:
        return TransferError(f"transfer of {self.plan.nbytes} bytes has not finished within {timeout} seconds")

    def result(self) -> TransferResult:
        """See :meth:`Transfer.result`."""
        self.synchronize()
        if self._result is None:
            raise TransferError("the transfer finished without a result")
        runtime = self._runtime
        if self._result.predicted is None and runtime.generation == generation():  # a path that was named
            self._result = TransferResult(*self._result, runtime.candidates.expected(self.plan, self.path))
        return self._result

    def cancel(self) -> bool:
        """See :meth:`Transfer.cancel`; what has been given to the GPU's streams has begun."""
        self._check_not_captured("cancel()")
        self._runtime.check_process()
        return self._runtime.cancel(self)

    def replan(self, plan: Plan) -> None:
        """See :meth:`Transfer.replan`."""
        if not self._captured:
            super().replan(plan)
        if not isinstance(plan, Plan):
            raise KVPlanError(f"plan is a {type(plan).__name__}; replan takes what CopyProgram.plan or join made")
        self._runtime.check_open()
        self._runtime.graphs.replan(self, plan)

    # What the runtime does with it.

    def _order(self, stream: int, layer: int | None) -> None:
        runtime = self._runtime
        runtime.check_process()
        if self._issued is not None:
            self._issued.wait()
        with runtime.lock:
            self._raise_error()
            if self._over:
                return
            event = self._end
            if layer is not None:
                event = next((mark for layers, mark in self._marks if layer in layers), event)
            if event:
                with runtime.device.current():
                    runtime.device.wait(stream, event)

    def _raise_error(self) -> None:
        if self._error is not None:
            if isinstance(self._error, KVPlanError):
                raise self._error.with_traceback(None)  # else it would grow by every raise, and hold what they held
            raise TransferError(f"transfer of {self.plan.nbytes} bytes failed: {self._error}") from self._error

    def _check_not_captured(self, call: str) -> None:
        if self._captured:
            raise TransferError(
                f"{call} of a transfer that was captured into a CUDA graph; it happens when the graph is replayed: "
                "synchronize the stream of the replay"
            )

    def _retire(self) -> bool:
        """End it if its last event has passed; the runtime's lock is held and its device current."""
        if self._over:
            self._give_back()
            return True
        device = self._runtime.device
        code = device.driver.cuEventQuery(self._end)
        if code == NOT_READY:
            return False
        if code:
            self._fail(
                TransferError(f"cuEventQuery returned {device.driver.name(code)}: the transfer, or work before it")
            )
        elif self._error is None:
            seconds = device.seconds(self._begin, self._end)
            result = TransferResult(self.plan.nbytes, seconds, self.path, self.copies, self.launches, self.predicted)
            ended, count = (result, self.plan.direction), self._runtime.tally.ends.append
            if not self._over:  # else whoever came between has ended it
                self._result, self._over = result, True  # from here to the end of count() no signal is looked at
                count(ended)
        self._over = True
        self._give_back()
        return True

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
            self._runtime.tally.fail(self.plan, self.path, error)

    def _give_back(self) -> None:
        """Give everything back, except while somebody blocks on its end; the runtime's lock is held.

        Broken off anywhere, it has given back what it no longer has, and can be called again.
        """
        if self._blockers:
            return
        pieces, events, none = self._pieces, self._runtime.events, list[int]()
        while True:
            if not pieces:  # asked behind the jump back, where a handler may have given them back
                break
            held = pieces[-1]
            del pieces[-1]  # from here to the end of append no signal is looked at
            held[0].append(held)
        borrowed = self._borrowed
        self._borrowed = none  # likewise
        events.extend(borrowed)
        self._marks, self._steps, self._after = [], [], None

    @property
    def _settled(self) -> bool:
        """Whether it has ended and given everything back."""
        return self._over and not self._pieces and not self._borrowed

    def __repr__(self) -> str:
        ended = "cancelled" if self._cancelled else "failed" if self._error else "done" if self._over else "in flight"
        state = "captured" if self._captured else ended
        return f"Transfer({self.plan!r}, {state})"


def stream_handle(stream: Any) -> int | None:
    """The driver's handle of a stream of torch, or of whatever follows its names; None where it is no stream."""
    handle = getattr(stream, "cuda_stream", None)
    if isinstance(handle, int):
        return handle
    protocol = getattr(stream, "__cuda_stream__", None)
    if callable(protocol):
        return int(protocol()[1])
    return None


def event_handle(event: Any) -> int | None:
    """The driver's handle of an event, 0 for one that was never recorded; None where it is no event of CUDA."""
    handle = getattr(event, "cuda_event", None)
    return handle if isinstance(handle, int) else None


def current_stream(ordinal: int) -> int | None:
    """Handle of torch's current stream on a device, or None where torch is not loaded or has not begun with CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # a tenth of the cost
    return int(raw(ordinal) if raw is not None else torch.cuda.current_stream(ordinal).cuda_stream)
