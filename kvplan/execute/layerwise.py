"""A transfer whose layers are submitted one by one, for stores that run while a model computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any

from kvplan.base.numbers import number_ranges
from kvplan.errors import KVPlanError, TransferError
from kvplan.execute.transfer import Transfer, TransferResult, cancellation, check_layer
from kvplan.plan.layers import even_edges, split_layers
from kvplan.plan.plan import Plan


@dataclass
class _Group:
    """Layers that move together.

    Attributes:
        layers: their global numbers, ascending.
        plan: the plan that moves them.
        left: those that were not submitted.
        transfer: the transfer of the plan, once all were submitted.
    """

    layers: tuple[int, ...]
    plan: Plan
    left: set[int]
    transfer: Transfer | None = None


class LayerwiseTransfer(Transfer):
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
        self.plan = plan
        pieces = split_layers(plan, even_edges(len(plan.layers), groups))
        self._groups = [_Group(tuple(sorted(layers)), piece, set(layers)) for layers, piece in pieces]
        self._submit, self._prepare = submit, prepare
        self._cancelled = False

    @property
    def layer_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the layers that are moved together: with the submit of the last layer of a group."""
        return tuple(group.layers for group in self._groups)

    @property
    def missing(self) -> tuple[int, ...]:
        """Return the layers that were not submitted yet, ascending."""
        return tuple(sorted(layer for group in self._groups for layer in group.left))

    def prepare(self) -> None:
        """Warm up for transfers like this one at engine start, so that no submit waits; see :meth:`Executor.prepare`.

        Raises:
            KVPlanError: a submit of the plan would raise an error.
        """
        for group in self._groups:
            self._prepare(group.plan)

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
        if self._cancelled:
            raise TransferError(cancellation(self.plan))
        if layer not in group.left:
            raise KVPlanError(f"layer {layer} of {self.plan!r} was submitted before; submit each layer once")
        if len(group.left) == 1:
            group.transfer = self._submit(group.plan, after)
        group.left.remove(layer)

    def done(self) -> bool:
        """Return whether all layers were submitted and have arrived or failed, or it was cancelled; never block."""
        return self._cancelled or all(group.transfer is not None and group.transfer.done() for group in self._groups)

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
        transfer = self._group(layer).transfer
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
        errors = []
        for each in self._begun():
            try:
                each.synchronize(None if end is None else max(end - monotonic(), 0))
            except TransferError as error:
                if not each.done():
                    raise self._late(timeout) from None
                errors.append(error)
        if errors:
            raise errors[0]
        self._check_complete()

    def result(self) -> TransferResult:
        """Wait for the transfer and return the sums over its layers; ``seconds`` leaves out the time between layers.

        Raises:
            TransferError: a layer failed or was not submitted.
        """
        self.synchronize()
        results = [each.result() for each in self._begun()]
        nbytes, seconds, paths, descriptors, launches = zip(*results, strict=True)
        predicted = [each.predicted for each in results if each.predicted is not None]
        return TransferResult(
            sum(nbytes), sum(seconds), " + ".join(dict.fromkeys(paths)), sum(descriptors), sum(launches),
            sum(predicted) if len(predicted) == len(results) else None,
        )  # fmt: skip

    def cancel(self) -> bool:
        """Cancel the transfer if none of its bytes was queued; see :meth:`Transfer.cancel`.

        Returns:
            True if it will not run; then it takes no further layer. False if a layer moves or has moved.
        """
        self._cancelled = self._cancelled or not self._begun()
        return self._cancelled

    def _group(self, layer: Any) -> _Group:
        number = check_layer(self.plan, layer)
        return next(group for group in self._groups if number in group.layers)

    def _begun(self) -> list[Transfer]:
        return [group.transfer for group in self._groups if group.transfer is not None]

    def _check_complete(self) -> None:
        if self._cancelled:
            raise TransferError(cancellation(self.plan))
        missing = self.missing
        if missing:
            raise TransferError(
                f"layer{'s' * (len(missing) > 1)} {number_ranges(missing)} of {self.plan!r} "
                f"{'were' if len(missing) > 1 else 'was'} not submitted; call submit(layer) for each layer"
            )
