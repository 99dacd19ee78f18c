"""Transfers of every path, as a whole or layer by layer: their methods and results, and the wait for ``after=``."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from time import monotonic
from typing import Any, NamedTuple, Self

from kvplan.base.numbers import number_ranges
from kvplan.base.threads import Call, Worker, error_of
from kvplan.base.values import integer
from kvplan.errors import KVPlanError, LayoutError, TransferError
from kvplan.layout.components import NOT_HERE
from kvplan.plan.layers import even_edges, split_layers
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


class OwnTransfer(Transfer):
    """A transfer that an executor of this process moves.

    Attributes:
        after: the ``after=`` that only the CPU can wait for, or None.
        answers: its error, or None, once it has completed; None until a thread waits for it.
        over: whether it is known to have ended.
        cancelled: whether it was cancelled.
        error: why it failed, or None.
    """

    after: Any = None
    answers: list[BaseException | None] | None = None
    over = cancelled = False
    error: BaseException | None = None

    def _raise_error(self) -> None:
        if isinstance(self.error, KVPlanError):
            raise self.error.with_traceback(None)  # otherwise each raise adds frames, which keep objects alive
        if self.error is not None:
            raise TransferError(f"transfer of {self.plan.nbytes} bytes failed: {self.error}") from self.error

    def __repr__(self) -> str:
        ended = "cancelled" if self.cancelled else "failed" if self.error else "done" if self.over else "in flight"
        return f"Transfer({self.plan!r}, {ended})"


class LayerwiseTransfer(OwnTransfer):
    """A transfer of one plan whose layers are submitted one by one. :meth:`kvplan.Executor.begin` returns it.

    It has one end: it is done when all layers were submitted and all their bytes have arrived.

    >>> import kvplan, numpy as np
    >>> gpu = kvplan.KVLayout.from_tensors("layer: block token dim", [np.ones((8, 4, 16), np.int8) for _ in range(3)])
    >>> pool = kvplan.allocate("block layer token dim", like=gpu)
    >>> with kvplan.Executor() as executor:
    ...     store = executor.begin(kvplan.compile(gpu, pool).plan([0, 1], [5, 6]))
    ...     for layer in range(3):  # while the model computes
    ...         store.submit(layer)
    ...     store.result().nbytes
    384
    """

    def __init__(self, plan: Plan, groups: int, submit: Callable[..., Transfer], prepare: Callable[..., None]) -> None:
        self.plan, self._submit, self._prepare = plan, submit, prepare
        self._pieces = split_layers(plan, even_edges(len(plan.layers), groups))
        self._missing = set(plan.layers)
        self._transfers: list[Transfer | None] = [None] * len(self._pieces)

    @property
    def layer_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the layers that are moved together: with the submit of the last layer of a group."""
        return tuple(tuple(sorted(layers)) for layers, _ in self._pieces)

    @property
    def missing(self) -> tuple[int, ...]:
        """Return the layers that were not submitted yet, ascending."""
        return tuple(sorted(self._missing))

    def prepare(self) -> None:
        """Warm up for transfers like this one at engine start, so that no submit waits; see :meth:`Executor.prepare`.

        Raises:
            KVPlanError: a submit of the plan would raise an error.
        """
        for _, piece in self._pieces:
            self._prepare(piece)

    def submit(self, layer: int, after: Any = None) -> None:
        """Queue the bytes of one layer and return at once. Layers may be submitted in any order, each once.

        Args:
            layer: global number of the layer.
            after: a stream, an event, a Transfer, or None: the copy begins when this has completed. Give the stream
                that writes the layer. If several layers move together, their copy waits for the ``after`` of the layer
                that is submitted last.

        Raises:
            LayoutError: the plan does not move this layer.
            KVPlanError: the layer was submitted before.
            TransferError: the transfer was cancelled, or :meth:`kvplan.Executor.submit` raises it; then the layer may
                be submitted again.
        """
        group = self._group(layer)
        layers, piece = self._pieces[group]
        self._raise_error()
        if layer not in self._missing:
            raise KVPlanError(f"layer {layer} of {self.plan!r} was submitted before; submit each layer once")
        if layers & self._missing == {layer}:
            self._transfers[group] = self._submit(piece, after)
        self._missing.remove(layer)

    def done(self) -> bool:
        """Return whether all layers were submitted and have arrived or failed, or it was cancelled; never block."""
        self.over = self.cancelled or all(each is not None and each.done() for each in self._transfers)
        return self.over

    def wait(self, stream: Any = None) -> None:
        """Make later work on ``stream`` wait for all layers; see :meth:`Transfer.wait`.

        Raises:
            TransferError: a layer was not submitted or failed, or the transfer was cancelled.
        """
        self._check_complete()
        for each in self._begun():
            each.wait(stream)

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        """Make later work on ``stream`` wait for one layer; see :meth:`Transfer.wait_layer`.

        Raises:
            LayoutError: the plan does not move this layer.
            TransferError: the layer was not submitted or failed, or the transfer was cancelled.
        """
        transfer = self._transfers[self._group(layer)]
        if transfer is None:
            self._check_complete()
        else:
            transfer.wait(stream)

    def await_issue(self) -> None:
        """Block until the driver calls of all submitted layers have been made; see :meth:`Transfer.await_issue`."""
        for each in self._begun():
            each.await_issue()

    def synchronize(self, timeout: float | None = None) -> None:
        """Block the calling thread until all submitted layers have arrived.

        Args:
            timeout: longest wait in seconds; None for no limit.

        Raises:
            TransferError: a layer failed or was not submitted, the transfer was cancelled, or it has not finished in
                time. In the first three cases, no byte of a submitted layer is still moving.
        """
        end = None if timeout is None else monotonic() + timeout
        failed = None
        for each in self._begun():
            try:
                each.synchronize(end and max(end - monotonic(), 0))
            except TransferError as error:
                if not each.done():
                    raise self._late(timeout) from None
                failed = failed or error
        if failed:
            raise failed
        self._check_complete()

    def result(self) -> TransferResult:
        """Wait for the transfer and return the sums over its layers; ``seconds`` leaves out the time between layers.

        Raises:
            TransferError: a layer failed or was not submitted.
        """
        self.synchronize()
        results = [each.result() for each in self._begun()]
        nbytes, seconds, paths, descriptors, launches = zip(*results, strict=True)
        predicted = None if results[0].predicted is None else sum(each.predicted or 0.0 for each in results)
        sums = sum(nbytes), sum(seconds), " + ".join(dict.fromkeys(paths)), sum(descriptors), sum(launches)
        return TransferResult(*sums, predicted)

    def cancel(self) -> bool:
        """Cancel the transfer if none of its bytes was queued; see :meth:`Transfer.cancel`.

        Returns:
            True if it will not run; then it takes no further layer. False if a layer moves or has moved.
        """
        if not self._begun():
            self.cancelled, self.error = True, TransferError(cancellation(self.plan))
        return self.cancelled

    def _group(self, layer: Any) -> int:
        number = check_layer(self.plan, layer)
        return next(group for group, (layers, _) in enumerate(self._pieces) if number in layers)

    def _begun(self) -> list[Transfer]:
        return [each for each in self._transfers if each is not None]

    def _check_complete(self) -> None:
        self._raise_error()
        if self._missing:
            missing = number_ranges(self.missing)
            raise TransferError(f"layers {missing} of {self.plan!r} were not submitted; call submit(layer) for each")


def check_layouts(plan: Plan) -> None:
    """Check that both sides of a plan can be moved.

    Raises:
        LayoutError: the destination is read-only, or addresses are not this process's.
    """
    for pair in plan.layouts:
        for layout in pair:
            if layout.addresses != "memory":
                raise LayoutError(f"the addresses of {layout!r} are {NOT_HERE[layout.addresses]}; nothing can be moved")
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


def call_when_done(after: Any, function: Callable[[BaseException | None], object], inside: set[int]) -> None:
    """Call a function with the error of a submit's ``after=``, or None, once it has completed.

    A thread of its own blocks in the wait if that cannot be interrupted, so that a caller can stop waiting.

    Args:
        after: a stream, an event or a transfer.
        function: the function. It must neither block nor raise an error.
        inside: identifiers of threads that must not wait for the executor's end; this thread is added.
    """
    wait = getattr(after, "synchronize", None) or after.wait
    if isinstance(after, Transfer):
        error = error_of(after.done)  # it belongs to the parent process of a fork
        if error is not None:
            function(error)
            return
        if after.add_done_callback(lambda: function(error_of(wait))):
            return

    def block() -> None:
        function(error_of(wait))

    try:
        Worker("kvplan-after", block, "no thread waits for an after=", inside).start()
    except TransferError:  # no more threads: the limit of the system, or an interpreter that exits
        block()


def check_after(after: Any, *, gpu: bool = False) -> None:
    """Check that ``after`` is a transfer, a stream or an event; for a GPU, also accept an object with a CUDA handle.

    Raises:
        KVPlanError: ``after`` has another type, or must be awaited, such as an event of asyncio.
    """
    if gpu and any(hasattr(after, name) for name in ("cuda_stream", "cuda_event", "__cuda_stream__")):
        return
    method = getattr(after, "synchronize", getattr(after, "wait", None))
    kind = f"after is a {type(after).__module__}.{type(after).__qualname__}"
    if not callable(method):
        raise KVPlanError(f"{kind}; give a stream, an event, a Transfer or None")
    if inspect.iscoroutinefunction(method):
        raise KVPlanError(f"{kind}, which must be awaited; await it before submit, or give a threading.Event")
