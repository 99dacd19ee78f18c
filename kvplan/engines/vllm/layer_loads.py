"""Loads that run in the step that uses them: the engine's stream waits for each layer where the model reads it.

The waits are called by vLLM's hook of attention layers. Some layers have no hook, such as an indexer's, and a replayed
graph calls none. So this file notes which hooks have been called. A layer is awaited by its hook only if its hook was
called before. The bytes of all other layers are awaited before the forward pass begins.

Source: vLLM 0.33.0, ``model_executor/layers/attention/kv_transfer_utils.py`` (``maybe_transfer_kv_layer``),
``v1/worker/kv_connector_model_runner_mixin.py``, ``v1/worker/gpu/kv_connector.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvplan.engines.shared import current_stream
from kvplan.engines.vllm.worker import LayerTransfer, Worker
from kvplan.errors import TransferError

logger = logging.getLogger("kvplan.engines.vllm")


class Place(NamedTuple):
    """The place of a layer's cache in the loads.

    Attributes:
        group: number of the KV-cache group.
        layer: number of the layer in the group's plans; None if the group is not split by layer.
    """

    group: int
    layer: int | None


def places_of(
    layer_names: Sequence[Sequence[str]], groups: Sequence[Sequence[Any]], caches: Mapping[str, Any] | None = None
) -> dict[str, tuple[Place, ...]]:
    """Return the place of each layer's cache.

    Args:
        layer_names: for each KV-cache group, the names of its layers.
        groups: for each KV-cache group, its references: one per layer; or fewer, if all layers of a block are packed.
        caches: tensors by layer. A layer that is in no group reads the cache of the layers with the same address.

    >>> from types import SimpleNamespace as Ref
    >>> places = places_of([["a", "b", "c"], ["d"]], [[Ref(tensor_idx=k) for k in (4, 2, 4)], [Ref(tensor_idx=4)]])
    >>> places["c"], places["d"]  # c shares its tensor with a
    ((Place(group=0, layer=0),), (Place(group=1, layer=0),))
    >>> places_of([["a", "b"]], [[Ref(tensor_idx=0)]])["b"]
    (Place(group=0, layer=None),)
    """
    places: dict[str, tuple[Place, ...]] = {}
    for group, (names, references) in enumerate(zip(layer_names, groups, strict=True)):
        order: dict[int, int] = {}  # as pages_of numbers them
        numbers = [order.setdefault(reference.tensor_idx, len(order)) for reference in references]
        split = len(numbers) == len(names)
        places |= {name: (Place(group, numbers[k] if split else None),) for k, name in enumerate(names)}
    at_address: dict[int, list[Place]] = {}
    for name, own in places.items():
        at_address.setdefault(_address((caches or {}).get(name)), []).extend(own)
    for name, cache in (caches or {}).items():
        if name not in places and _address(cache) in at_address:
            places[name] = tuple(at_address[_address(cache)])
    return places


def _address(cache: Any) -> int:
    return int(cache.data_ptr()) if hasattr(cache, "data_ptr") else 0


class _Flight:
    """A transfer of this step, and the number of its layer groups that the stream already waits for."""

    def __init__(self, moved: LayerTransfer) -> None:
        self.transfer, self.groups, self.jobs = moved.transfer, moved.groups, moved.jobs
        self._turns = {layer: turn for turn, layers in enumerate(self.transfer.layer_groups, 1) for layer in layers}
        self._waited = 0

    def wait(self, device: str, layer: int | None = None) -> None:
        """Let the stream wait for a layer and those before it, or for all bytes."""
        turn = len(self._turns) + 1 if layer is None else self._turns[layer]
        if turn <= self._waited:
            return
        self._waited = turn
        try:
            stream = current_stream(device)
            self.transfer.wait(stream) if layer is None else self.transfer.wait_layer(layer, stream)
        except Exception as error:  # the forward pass goes on; the jobs are reported
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Fail all jobs of the transfer."""
        for job in self.jobs:
            job.fail(error)


class LayerLoads:
    """The loads of a worker that run in the step that uses them.

    The connector calls, for each step: :meth:`load`, if the step has such loads; :meth:`wait_layer` from the hooks;
    :meth:`leave_forward`, and :meth:`settle`.

    Args:
        worker: the worker that moves the blocks.
        places: the place of each layer's cache, from :func:`places_of`.
    """

    def __init__(self, worker: Worker, places: Mapping[str, tuple[Place, ...]]) -> None:
        self._worker = worker
        self._places = dict(places)
        self._hooked: set[str] = set()  # a draft model's, too, whose forward pass comes later in the step
        self._trusted, self._called = True, False
        self._jobs: list[int] = []
        self._flights: list[_Flight] = []

    def load(self, loads: Sequence[tuple[int, Any, Any]], *, hooked: bool) -> None:
        """Submit the loads of this step, and let the stream wait for the bytes that no hook waits for.

        An error of a job is kept until :meth:`settle`, because the forward pass runs in any case.

        Args:
            loads: for each load, its number, its host chunks and its device blocks.
            hooked: whether the hooks of this forward pass will be called. If not, the stream waits for all bytes.
        """
        self._called = False
        known = self._hooked if hooked and self._trusted else set()
        split = {place.group for name in known for place in self._places.get(name, ()) if place.layer is not None}
        groups = {place.group for places in self._places.values() for place in places}
        self._jobs += [number for number, *_ in loads]
        for moved in self._worker.submit_layers(loads, groups - split):
            flight = _Flight(moved)
            if not moved.by_layer:
                flight.wait(self._worker.device)
                continue
            self._flights.append(flight)
            for name in self._places.keys() - known:
                self._wait(flight, name)

    def wait_layer(self, name: str) -> None:
        """Let torch's current stream wait for the bytes that a layer reads. The CPU waits only without a GPU."""
        self._called = True
        self._hooked.add(name)
        for flight in self._flights:
            self._wait(flight, name)

    def _wait(self, flight: _Flight, name: str) -> None:
        for group, layer in self._places.get(name, ()):  # another layer reads no cache that is loaded
            if group in flight.groups:
                flight.wait(self._worker.device, layer)

    def leave_forward(self) -> None:
        """Note the end of the forward pass: later work of the stream waits for all loads of the step.

        If no hook was called although the forward pass seemed to have hooks, the model may have read blocks that had
        not arrived. Then the loads fail, and later loads are awaited before the forward pass.
        """
        flights, self._flights = self._flights, []
        if flights and not self._called:
            self._trusted = False
            logger.error("the hooks of the attention layers were not called; loads are awaited before the model now")
        for flight in flights:
            flight.wait(self._worker.device)
            if not self._called:
                flight.fail(TransferError("the forward pass called no hook that waits for layers"))

    def settle(self) -> None:
        """Let failed loads of the step go to :meth:`Worker.take_failures`, after :meth:`leave_forward`.

        The CPU waits until all copies have been given to the GPU, not until they have run.
        """
        jobs, self._jobs = self._jobs, []
        if jobs:
            self._worker.settle(jobs)
