"""The Protocol of paths: the methods that the executor calls on each way of moving bytes between a GPU and the host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

from kvplan.cost.policy import HOST_ROUTES
from kvplan.cuda.call_list import CallList
from kvplan.cuda.reach import Facts, ordinal_of
from kvplan.errors import HostMemoryError, KVPlanError, PathError
from kvplan.execute.gpu.device_transfer import DeviceTransfer
from kvplan.execute.gpu.resources import Resources
from kvplan.layout.strides import Int64Array
from kvplan.plan.layers import LayerCuts
from kvplan.plan.plan import Plan

Refusal = tuple[type[KVPlanError], str]  # the error that a refused plan raises: its class and its text


class Sides(NamedTuple):
    """The memory on both sides of a plan.

    Attributes:
        here: the executor's own GPU, such as ``"cuda:0"``.
        devices: all GPUs with memory in the plan, sorted by name.
        pageable: the reason why some of the host memory is not pinned, or "".
        unserved: the reason why no path serves such a plan, or "".
        by_kernels: whether kernels of the GPU reach all of the memory.
        route: the way of the bytes: one of :data:`kvplan.cost.policy.ROUTES`, or ``"host"``.
        unreachable: the reason why the GPU cannot reach another GPU's memory of the plan, or "".
    """

    here: str
    devices: tuple[str, ...]
    pageable: str
    unserved: str
    by_kernels: bool
    route: str = ""
    unreachable: str = ""

    @property
    def passing(self) -> bool:
        """Return whether the facts may be others for the next plan: memory can be pinned, or mapped for a GPU."""
        return bool(self.pageable or self.unreachable)

    @property
    def peer(self) -> int:
        """Return the number of the first other GPU."""
        return ordinal_of(next(name for name in self.devices if name != self.here))


class Streams(Protocol):
    """The streams on which a path issues its work: the streams of a lane."""

    @property
    def name(self) -> str:
        """Return the name of the lane."""

    @property
    def copy(self) -> int:
        """Return the stream for copies."""

    @property
    def kernel(self) -> int:
        """Return the stream for kernels."""

    @property
    def other(self) -> int:
        """Return a second stream for kernels."""

    @property
    def last(self) -> DeviceTransfer | None:
        """Return the last transfer issued on these streams, while it is in flight."""

    def sides(self, count: int) -> Sequence[int]:
        """Return ``count`` more streams for copies."""


class Path(Protocol):
    """One way to move a plan's bytes. An executor makes one object of each class in ``backend.PATHS``.

    For each submit the executor calls, in this order:

    1. :meth:`refuse`, in the submitting thread; not if ``auto`` has chosen this path for such plans before.
    2. :meth:`prepare`, once for the plan, or once for each plan of layers that it was cut into.
    3. :meth:`write`, with each result of :meth:`prepare`, in the same order.

    Steps 2 and 3 run in one thread, and the GPU is current there. No step makes a driver call that moves bytes: a path
    writes its calls down. The executor makes a short list of calls at once. A long list goes to a thread that stays in
    compiled code. In front of the calls the executor lets the first stream of :meth:`streams` wait for all earlier work
    that the transfer depends on, and records an event there. It records one on the second stream behind them.

    An exception that :meth:`prepare` or :meth:`write` raises is the error of the transfer. The path need not undo
    anything: the executor waits until all issued work of the lane has ended, and then takes the transfer's loans back.
    So a path must borrow memory and events from the transfer: ``slot``, ``scratch``, ``event``.

    Attributes:
        name: name of the path in results, in statistics and in ``Policy(path=…)``.
    """

    name: str
    _resources: Resources

    def __init__(self, resources: Resources) -> None:
        self._resources = resources

    def refuse(self, plan: Plan, sides: Sides) -> Refusal | None:
        """Return why the path cannot serve a plan, or None if it can. The call must not change anything."""
        del plan, sides
        return None

    def streams(self, lane: Streams, direction: str) -> tuple[int, int]:
        """Return the stream on which a transfer begins, and the stream on which it ends.

        All work of the transfer must run after the work already issued on the first stream. It must also run before any
        work that is issued on the second stream later.
        """
        del direction
        return lane.copy, lane.copy

    def warm_up(self, plan: Plan) -> None:
        """Compile and upload everything that plans of the same programs need, for any number of units; move nothing."""
        del plan

    def prepare(self, transfer: DeviceTransfer, plan: Plan, lane: Streams) -> Any:
        """Do all work that needs no call of the driver, and count it (``transfer.count``).

        Args:
            transfer: lends memory and events, and holds them until it has ended.
            plan: the transfer's plan, or its plan for some layers. It moves at least one byte.
            lane: the streams.

        Returns:
            The argument ``prepared`` of :meth:`write`.
        """
        raise NotImplementedError

    def write(self, transfer: DeviceTransfer, prepared: Any, calls: CallList) -> None:
        """Write down the calls that move the bytes.

        Args:
            transfer: as in :meth:`prepare`.
            prepared: the result of :meth:`prepare`.
            calls: the list to which the calls are added.
        """
        raise NotImplementedError

    def write_layers(
        self, transfer: DeviceTransfer, cuts: LayerCuts, lane: Streams, marks: Sequence[int], calls: CallList
    ) -> list[int] | None:  # fmt: skip
        """Write down the calls of all pieces of a transfer by layer, if the path can do so at once.

        The executor calls this in place of :meth:`prepare` and :meth:`write`, if the transfer's plan has one part.

        Args:
            transfer, lane, calls: as in :meth:`prepare` and :meth:`write`.
            cuts: the pieces of the transfer's plan.
            marks: for each piece, the event to record behind it, on the second stream of :meth:`streams`.

        Returns:
            For each piece, the number of calls in the list up to the record of its event; None if nothing is written.
        """
        del transfer, cuts, lane, marks, calls
        return None

    def known(self, plan: Plan) -> Any:
        """Return what :meth:`issue_known` needs if such a plan was prepared before; None if it must be prepared."""
        del plan

    def issue_known(self, transfer: DeviceTransfer, known: Any, lane: Streams, begin: int, end: int) -> None:
        """Do all of :meth:`prepare` and :meth:`issue_recorded` at once.

        Args:
            transfer, lane: as in :meth:`prepare`.
            known: the result of :meth:`known` for the transfer's plan.
            begin, end: the events before and behind the work.
        """
        del transfer, known, lane, begin, end
        raise NotImplementedError(self.name)

    def issue_recorded(self, transfer: DeviceTransfer, prepared: Any, begin: int, end: int) -> bool:
        """Record an event, issue all work of a transfer and record a second event, if one call does it all.

        The executor calls this in place of :meth:`write`, for a transfer that is not cut and has one stream.

        Args:
            transfer, prepared: as in :meth:`write`.
            begin, end: the events before and behind the work.

        Returns:
            Whether the work is issued. If not, nothing is issued, and the executor records the events itself.
        """
        del transfer, prepared, begin, end
        return False

    def upload(self, ahead: Any, plan: Plan) -> None:
        """Upload what a submit of a plan needs before the submit, if the path can; the default does nothing.

        Args:
            ahead: the room of the plan's units; see :class:`kvplan.execute.gpu.launches.ahead.Ahead`.
            plan: the plan. It has one part.
        """
        del ahead, plan

    def keeps(self, plan: Plan) -> bool:
        """Return whether :meth:`keep` can upload the units of plans like one, which has one part; by default, not."""
        del plan
        return False

    def keep(
        self, ahead: Any, plan: Plan, addresses: Int64Array, offsets: Int64Array, *, gathers: bool
    ) -> Any:  # fmt: skip
        """Upload unit addresses for many plans like one, if the path can; the default does nothing.

        Args:
            ahead: a room for them; see :class:`kvplan.execute.gpu.launches.ahead.Ahead`.
            plan: the plan of some of the units. It has one part.
            addresses: (n,) int64: address of each unit.
            offsets: (m,) int64: where units begin in a slot.
            gathers: whether units are copied to slots; otherwise, slots to units.

        Returns:
            A :class:`kvplan.execute.gpu.launches.resident.Resident`, or None.
        """
        del ahead, plan, addresses, offsets, gathers


def refuse_kernels(name: str, sides: Sides) -> Refusal | None:
    """Return why a path that launches kernels cannot serve a plan: pageable memory, another GPU's, or no Triton."""
    if sides.by_kernels:
        return None
    if sides.unreachable:
        return PathError, f"path {name!r} cannot serve this plan: {sides.unreachable}"
    if sides.route in HOST_ROUTES and sides.devices != (sides.here,):
        others = ", ".join(sides.devices)
        return PathError, f"path {name!r} reaches {sides.here} and pinned memory; the plan is of {others}"
    if sides.pageable:
        text = f"path {name!r} reaches pinned memory only: {sides.pageable}; pin it (kvplan.allocate, torch's "
        return HostMemoryError, text + "pin_memory, cudaHostRegister) or take path 'copy_engine'"
    return PathError, f"path {name!r} needs Triton, which is not installed: pip install triton cuda-bindings"


def route_of(plan: Plan, here: str) -> str:
    """Return the way of a plan's bytes, as the executor of the GPU ``here`` sees it.

    Between GPUs it is ``"pull"`` if some of the sources are another GPU's memory, otherwise ``"push"``.
    """
    if plan.direction != "device":
        return plan.direction
    for side, route in ((0, "pull"), (1, "push")):
        for pair in plan.layouts:
            if pair[side].device != here and _ordinary(pair[side].device) != here:
                return route
    return "device"


def _ordinary(device: str) -> str:
    return device if ":" in device else f"{device}:0"


def sides_of(here: str, plan: Plan, facts: Sequence[Facts]) -> Sides:
    """Describe the memory on both sides of a plan.

    Args:
        here: the executor's own GPU.
        plan: the plan.
        facts: the facts of each layout of the plan: of a source, of its destination, of the next source, ...
    """
    devices = {_ordinary(fact.device) for fact in facts} - {"cpu:0"}
    pageable = next((fact.pageable for fact in facts if fact.pageable), "")
    reasons = [fact.unreachable for fact in facts] + [destination.unwritable for destination in facts[1::2]]
    unreachable = next(filter(None, reasons), "")
    unserved, route = "", route_of(plan, here)
    if route == "host":
        unserved = "between CPU memories, the executor of device 'cpu' copies"
    elif foreign := [name for name in sorted(devices) if not name.startswith("cuda:")]:
        unserved = f"moves memory of CUDA's GPUs and of the host; {foreign[0]} is no GPU of CUDA"
    elif here not in devices:
        names = sorted(devices)
        unserved = (
            f"moves memory of {here}, and this plan is of {', '.join(names)}; take an executor of {' or '.join(names)}"
        )
    own = route not in HOST_ROUTES or devices == {here}
    by_kernels = own and not pageable and not unreachable and triton_is_there()
    return Sides(here, tuple(sorted(devices)), pageable, unserved, by_kernels, route, unreachable)


@cache
def triton_is_there() -> bool:
    """Return whether Triton is installed. The paths that launch kernels need it."""
    return find_spec("triton") is not None
