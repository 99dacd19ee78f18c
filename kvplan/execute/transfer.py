"""Transfers of every path: their methods, their results, and the wait for a transfer's ``after=``."""

from __future__ import annotations

import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Self

from kvplan.base.numbers import number_ranges
from kvplan.base.threads import Call, error_of
from kvplan.base.values import integer
from kvplan.errors import KVPlanError, LayoutError, TransferError
from kvplan.layout.components import NOT_HERE
from kvplan.plan.plan import Plan


class _Result(NamedTuple):
    nbytes: int
    seconds: float
    path: str
    descriptors: int
    launches: int


class TransferResult(_Result):
    """The result of a finished transfer.

    Attributes:
        nbytes: bytes moved.
        seconds: seconds from the start of the copying to its end, without queueing and without loading compiled loops.
            On a CPU, pauses for transfers of high priority are included.
        path: name of the path that moved the bytes.
        descriptors: contiguous copies issued.
        launches: calls that issued these copies: driver calls, kernel launches, or tasks of the host path.
        predicted: the ``seconds`` that the cost model predicted from the device's profile. None on the CPU, which
            has no cost model. It is not a field of the tuple.

    >>> nbytes, seconds, path, descriptors, launches = made = TransferResult(4096, 1e-5, "kernel", 2, 1, predicted=2e-5)
    >>> seconds, made.predicted
    (1e-05, 2e-05)
    """

    predicted: float | None

    def __new__(
        cls, nbytes: int, seconds: float, path: str, descriptors: int, launches: int, predicted: float | None = None
    ) -> Self:
        """Make the tuple of five fields, and set the prediction."""
        self = super().__new__(cls, nbytes, seconds, path, descriptors, launches)
        self.predicted = predicted
        return self


class Transfer(ABC):
    """A submitted plan. Until its end, it keeps alive the plan and all memory that the plan touches.

    :meth:`kvplan.Executor.submit` returns it. Where no stream can wait for a transfer, the CPU waits for all of it.

    Attributes:
        plan: the plan that it moves.

    >>> import kvplan, numpy as np
    >>> layout = kvplan.KVLayout.from_tensors("block token dim", np.zeros((8, 4, 16), np.int8))
    >>> with kvplan.Executor() as executor:
    ...     transfer = executor.submit(kvplan.compile(layout, layout).plan([0, 1], [5, 6]))
    >>> transfer.done(), transfer.result().nbytes
    (True, 128)
    """

    plan: Plan
    _result: TransferResult | None = None

    @abstractmethod
    def done(self) -> bool:
        """Return whether it has finished, successfully or not; never block."""

    def wait(self, stream: Any = None) -> None:
        """Make later work on ``stream`` wait for this transfer.

        On a GPU the stream waits, and the call returns at once. The CPU waits only until the driver calls of the
        transfer have been made. For a short transfer the submit makes them. For a long one, or one that touches
        pageable memory, a thread makes them that needs no interpreter. If ``after=`` is not a CUDA object, a Python
        thread waits for it first.

        The host path has no streams: the call returns when the bytes have arrived, whatever the stream.

        Args:
            stream: a stream of torch, or any object with ``cuda_stream`` or ``__cuda_stream__``; by default torch's
                current stream on each GPU of the plan.

        Raises:
            TransferError: the transfer failed.
        """
        del stream
        self.synchronize()

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        """Make later work on ``stream`` wait for the bytes of one layer of a transfer submitted ``by_layer``.

        The CPU waits only until the driver calls for the layers up to this one have been made.

        Args:
            layer: global number of the layer.
            stream: a stream, as in :meth:`wait`.

        Raises:
            LayoutError: the plan does not move this layer.
            TransferError: the transfer failed.
        """
        check_layer(self.plan, layer)
        self.wait(stream)

    def await_issue(self) -> None:
        """Block until every driver call of the transfer has been made. The GPU may still be copying.

        After that, a wait of a stream returns at once. Without a GPU it blocks until the bytes have arrived.

        Raises:
            TransferError: a driver call failed.
        """
        self.synchronize()

    @property
    def layer_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the layers that arrive together, group by group, in the order in which the groups arrive.

        A stream that has waited for one layer of a group has waited for all layers of this group and of earlier ones.

        >>> import kvplan, numpy as np
        >>> layout = kvplan.KVLayout.from_tensors("layer block token dim", np.zeros((2, 8, 4, 16), np.int8))
        >>> with kvplan.Executor() as executor:
        ...     executor.submit(kvplan.compile(layout, layout).plan([0], [5]), by_layer=True).layer_groups
        ((0, 1),)
        """
        return (self.plan.layers,)

    @abstractmethod
    def synchronize(self, timeout: float | None = None) -> None:
        """Block the calling thread until the transfer has finished.

        Args:
            timeout: longest wait in seconds; None for no limit.

        Raises:
            TransferError: the transfer failed, or has not finished in time; then it continues.
        """

    def result(self) -> TransferResult:
        """Wait for the transfer and return its result.

        Raises:
            TransferError: the transfer failed.
        """
        self.synchronize()
        if self._result is None:
            raise TransferError("the transfer finished without a result")
        return self._result

    def cancel(self) -> bool:
        """Cancel a pending transfer: one that waits on the CPU for its ``after=``, or behind a transfer that does so.

        A cancelled transfer has touched no byte and is done; transfers behind it continue. A wait for it raises
        TransferError. A transfer that named it as ``after=`` fails with a TransferError.

        Returns:
            True if it will not run. False if it has begun or ended; then nothing changes.
        """
        return False

    def add_done_callback(self, function: Call) -> bool:
        """Call a function once, in the thread that ends the transfer; or now, if it has ended.

        The function must neither block nor raise an error.

        Returns:
            False if it will never be called: no thread ends this transfer, and a caller must wait or ask for its end.
        """
        del function
        return False

    def _late(self, timeout: float | None) -> TransferError:
        return TransferError(f"transfer of {self.plan.nbytes} bytes has not finished within {timeout} seconds")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.plan!r})"


def check_layouts(plan: Plan) -> None:
    """Check that both sides of a plan can be moved.

    Raises:
        LayoutError: the destination is read-only, or addresses are not this process's.
    """
    for pair in plan.layouts:
        for layout in pair:
            if layout.addresses != "memory":
                where = NOT_HERE[layout.addresses]
                raise LayoutError(f"the addresses of {layout!r} are {where}; nothing can be moved")
        if not pair[1].writable:
            raise LayoutError(f"the destination {pair[1]!r} holds a read-only array; pass a writable one")


def check_layer(plan: Plan, layer: Any) -> int:
    """Return the global number of a layer that a plan moves.

    Raises:
        LayoutError: the plan does not move the layer, or ``layer`` is not a number.
    """
    number = integer("layer", layer)
    if number not in plan.layers:
        raise LayoutError(f"layer {number} is not moved by {plan!r}; its layers are {number_ranges(plan.layers)}")
    return number


def cancellation(plan: Plan) -> str:
    """Return the error message of a cancelled transfer."""
    return f"transfer of {plan.nbytes} bytes was cancelled before it began; nothing was moved"


def wait_for(after: Any) -> None:
    """Block until the stream, event or transfer that a submit named with ``after=`` has completed.

    Raises:
        TransferError: ``after`` is a transfer that failed.
    """
    if hasattr(after, "synchronize"):
        after.synchronize()
    else:
        after.wait()


def call_when_done(after: Any, function: Callable[[BaseException | None], object], inside: set[int]) -> None:
    """Call a function with the error of a submit's ``after=``, or None, once it has completed.

    A thread of its own blocks in the wait if that cannot be interrupted, so that a caller can stop waiting.

    Args:
        after: a stream, an event or a transfer.
        function: the function. It must neither block nor raise an error.
        inside: identifiers of threads that must not wait for the executor's end; this thread is added.
    """
    wait = partial(wait_for, after)
    if isinstance(after, Transfer):
        error = error_of(after.done)  # it belongs to the parent process of a fork
        if error is not None:
            function(error)
            return
        if after.add_done_callback(lambda: function(error_of(wait))):
            return

    def block() -> None:
        me = threading.get_ident()
        inside.add(me)
        error = error_of(wait)
        inside.discard(me)
        function(error)

    try:
        threading.Thread(target=block, name="kvplan-after", daemon=True).start()
    except RuntimeError:  # no more threads: the limit of the system, or an interpreter that exits
        function(error_of(wait))


def check_after(after: Any, *, gpu: bool = False) -> None:
    """Check that ``after`` is a transfer, a stream or an event; for a GPU, also accept an object with a CUDA handle.

    Raises:
        KVPlanError: ``after`` has another type, or must be awaited, such as an event of asyncio.
    """
    handles = ("cuda_stream", "cuda_event", "__cuda_stream__")
    if gpu and any(hasattr(after, name) for name in handles):
        return
    method = getattr(after, "synchronize", getattr(after, "wait", None))
    kind = f"{type(after).__module__}.{type(after).__qualname__}"
    if not callable(method):
        raise KVPlanError(f"after is a {kind}; give a stream, an event, a Transfer or None")
    if inspect.iscoroutinefunction(method):
        raise KVPlanError(
            f"after is a {kind}, which must be awaited; await it before submit, or give a threading.Event"
        )
