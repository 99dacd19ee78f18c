"""Loads that run in the step that uses them: the engine's stream waits for each layer where the model reads it.

The waits are called by vLLM's hook of attention layers. Some layers have no hook, such as an indexer's, and a replayed
graph calls none. So this file notes the hooks of a first forward pass. A layer is awaited by its hook only if its hook
was called there. The bytes of all other layers are awaited before the forward pass begins.

Source: vLLM 0.33.0, ``model_executor/layers/attention/kv_transfer_utils.py`` (``maybe_transfer_kv_layer``),
``v1/worker/kv_connector_model_runner_mixin.py``, ``v1/worker/gpu/kv_connector.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kvplan.engines.streams import current_stream
from kvplan.engines.vllm.lines import Job
from kvplan.engines.vllm.worker import Worker
from kvplan.errors import TransferError
from kvplan.execute.transfer import Transfer

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
    found: dict[str, tuple[Place, ...]] = {}
    for group, (names, references) in enumerate(zip(layer_names, groups, strict=True)):
        order: dict[int, int] = {}  # as pages_of numbers them
        numbers = [order.setdefault(reference.tensor_idx, len(order)) for reference in references]
        split = len(numbers) == len(names)
        for k, name in enumerate(names):
            found[name] = (Place(group, numbers[k] if split else None),)
    by_address: dict[int, list[Place]] = {}
    for name, places in found.items():
        by_address.setdefault(_address((caches or {}).get(name)), []).extend(places)
    for name, cache in (caches or {}).items():
        if name not in found and _address(cache) in by_address:
            found[name] = tuple(by_address[_address(cache)])
    return found


def _address(cache: Any) -> int:
    return int(cache.data_ptr()) if hasattr(cache, "data_ptr") else 0


class _Route(NamedTuple):
    """The waits for a transfer of a certain cut.

    Attributes:
        steps: for each layer that has a hook, or whose cache is not moved: the number of layer groups to wait for.
        firsts: for each layer group of the transfer, its first layer.
        early: number of layer groups to wait for before the forward pass.
    """

    steps: dict[str, int]
    firsts: tuple[int, ...]
    early: int


class _Flight:
    """A transfer of this step, and the number of its layer groups that the stream already waits for."""

    __slots__ = ("jobs", "last", "route", "steps", "transfer", "waited")

    def __init__(self, jobs: Sequence[Job], transfer: Transfer, route: _Route) -> None:
        self.jobs = jobs
        self.transfer = transfer
        self.route = route
        self.steps = route.steps
        self.last = len(route.firsts)
        self.waited = 0

    def fail(self, error: Exception) -> None:
        """Fail all jobs of the transfer."""
        for job in self.jobs:
            job.fail(error)


class LayerLoads:
    """The loads of a worker that run in the step that uses them.

    The connector calls, for each step: :meth:`begin_forward`; :meth:`load`, if the step has such loads; then
    :meth:`wait_layer` from the hooks, while :attr:`waiting`; :meth:`leave_forward`, and :meth:`settle`.

    Args:
        worker: the worker that moves the blocks.
        places: the place of each layer's cache, from :func:`places_of`.
        stall: function that calls its argument, by which the stream waits for a load; see :meth:`StepClock.stall`.

    Attributes:
        waiting: whether hooks must call :meth:`wait_layer`. It is an attribute, because a step has a hook per layer.
    """

    def __init__(
        self,
        worker: Worker,
        places: Mapping[str, tuple[Place, ...]],
        stall: Callable[[Callable[[], object]], object] = lambda wait: wait(),
    ) -> None:
        self.waiting = True
        self._stall = stall
        self._worker = worker
        self._places = dict(places)
        self._groups = frozenset(place.group for found in self._places.values() for place in found)
        self._hooked: dict[str, None] = {}  # in the order of execution
        self._late: set[str] = set()  # layers of a draft model, whose forward pass comes later in the step
        self._noting = True  # until the end of the first step whose hooks were called
        self._in_forward = self._called = False
        self._routes: dict[Any, _Route] = {}
        self._jobs: list[Job] = []
        self._flights: list[_Flight] = []

    def begin_forward(self) -> None:
        """Note the beginning of a step, before its loads and its forward pass."""
        if self._hooked and self._noting:
            self._noting = False
        self._in_forward, self._called = True, False
        self.waiting = self._noting

    def load(self, loads: Sequence[tuple[int, Any, Any]], *, hooked: bool) -> None:
        """Submit the loads of this step, and let the stream wait for the bytes that no hook waits for.

        An error of a job is kept until :meth:`settle`, because the forward pass runs in any case.

        Args:
            loads: for each load, its number, its host chunks and its device blocks.
            hooked: whether the hooks of this forward pass will be called. If not, the stream waits for all bytes.
        """
        known = self._hooked if hooked else {}
        split = {place.group for name in known for place in self._places.get(name, ()) if place.layer is not None}
        whole = self._groups - split
        jobs, transfers = self._worker.submit_layers(loads, whole)
        self._jobs += jobs
        for transfer, groups, mine in transfers:
            flight = _Flight(mine, transfer, self._route(transfer, groups))
            self._flights.append(flight)
            if not hooked or not split.issuperset(groups):
                self._wait_whole(flight)
            elif flight.route.early:
                self._wait_until(flight, flight.route.early)
        self._look()

    def wait_layer(self, name: str) -> None:
        """Let torch's current stream wait for the bytes that a layer reads. The CPU waits only without a GPU."""
        self._called = True
        for flight in self._flights:
            step = flight.steps.get(name, flight.last)  # an unknown layer may read any cache
            if step > flight.waited:
                self._wait_until(flight, step)
                self._look()
        if self._noting or name not in self._hooked:
            self._note(name)

    def leave_forward(self) -> None:
        """Note the end of the forward pass: later work of the stream waits for all loads of the step.

        If no hook was called although the forward pass seemed to have hooks, the model may have read blocks that had
        not arrived. Then the loads fail, and later loads are awaited before the forward pass.
        """
        self._in_forward = False
        unread = [flight for flight in self._flights if flight.waited < flight.last]
        if not unread:
            return
        if not self._called:
            self._hooked, self._noting = {}, False
            self._routes.clear()
            logger.error("the hooks of the attention layers were not called; loads are awaited before the model now")
        for flight in unread:
            if not self._called:
                flight.fail(TransferError("the forward pass called no hook that waits for layers"))
            self._wait_whole(flight)
        self._look()

    def settle(self) -> None:
        """Let failed loads of the step go to :meth:`Worker.take_failures`, after :meth:`leave_forward`.

        The CPU waits until all copies have been given to the GPU, not until they have run.
        """
        jobs, self._jobs, self._flights = self._jobs, [], []
        for job in jobs:
            job.await_issue()
            if job.error:
                self._worker.give_up(job)

    def _look(self) -> None:
        self.waiting = self._noting or any(flight.waited < flight.last for flight in self._flights)

    def _note(self, name: str) -> None:
        """Note that a layer has a hook: from the next step on, its bytes are awaited there."""
        if self._in_forward and name not in self._hooked:
            self._hooked[name] = None
            self._late.discard(name)
            self._routes.clear()
        elif not self._in_forward and name not in self._hooked and name not in self._late:
            self._late.add(name)
            self._routes.clear()

    def _route(self, transfer: Transfer, groups: tuple[int, ...]) -> _Route:
        cut = transfer.layer_groups
        found = self._routes.get((cut, groups))
        if found is None:
            found = self._routes[cut, groups] = self._new_route(cut, groups)
        return found

    def _new_route(self, cut: tuple[tuple[int, ...], ...], groups: tuple[int, ...]) -> _Route:
        group_of = {layer: number for number, layers in enumerate(cut, 1) for layer in layers}
        steps, early = {}, 0
        for name, places in self._places.items():
            mine = [place.layer for place in places if place.group in groups]
            step = max((len(cut) if layer is None else group_of.get(layer, 0) for layer in mine), default=0)
            if name in self._hooked:
                steps[name] = step
            elif name not in self._late:
                early = max(early, step)
        steps |= {name: 0 for name in self._hooked if name not in self._places}  # layers without a cache of ours
        return _Route(steps, tuple(layers[0] for layers in cut), early)

    def _wait_until(self, flight: _Flight, step: int) -> None:
        """Let the stream wait for a group of layers. Earlier groups, as those of skipped layers, arrive before it."""
        try:
            stream = current_stream(self._worker.device)
            self._stall(lambda: flight.transfer.wait_layer(flight.route.firsts[step - 1], stream))
        except Exception as error:  # noqa: BLE001  # the forward pass goes on; settle reports the job
            flight.fail(error)
        flight.waited = step

    def _wait_whole(self, flight: _Flight) -> None:
        try:
            stream = current_stream(self._worker.device)
            self._stall(lambda: flight.transfer.wait(stream))
        except Exception as error:  # noqa: BLE001  # as above
            flight.fail(error)
        flight.waited = flight.last
