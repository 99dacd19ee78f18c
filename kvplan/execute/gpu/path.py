"""The Protocol of paths: the methods that the executor calls on each way of moving bytes between a GPU and the host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple, Protocol

from kvplan.cost.policy import HOST_ROUTES
from kvplan.cuda.reach import Facts, ordinal_of
from kvplan.errors import HostMemoryError, KVPlanError, PathError
from kvplan.execute.gpu.gpu_transfer import GpuTransfer, Streams
from kvplan.layout.strides import Int64Array
from kvplan.plan.plan import Plan

# A list of more calls, and copies in batches, goes to the issuer: the submitting thread makes one in about 1 us.
INLINE_EFFORT = 96


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


class Path(Protocol):
    """One way to move a plan's bytes. An executor makes one object of each class in ``backend.PATHS``.

    The executor calls :meth:`refuse` once for plans of the same run groups, unless their memory may change, and
    :meth:`write` for each submit, while it holds its lock and the GPU is current. No step makes a driver call that
    moves bytes: a path writes its calls down. The executor makes a short list of calls at once. A long list goes to a
    thread that stays in compiled code. In front of the calls it lets the first stream of :meth:`streams` wait for all
    earlier work that the transfer depends on.

    An exception that :meth:`write` raises is the error of the transfer. The path need not undo anything, if it borrows
    memory and events from the transfer: ``slot``, ``scratch``, ``event``.

    Attributes:
        name: name of the path in results, in statistics and in ``Policy(path=…)``.
    """

    name: str

    def refuse(self, plan: Plan, sides: Sides) -> KVPlanError | None:
        """Return the error of a plan that the path cannot serve, or None, whatever its units. Change nothing."""

    def streams(self, lane: Streams, direction: str) -> tuple[int, int]:
        """Return the stream on which a transfer begins, and the stream on which it ends.

        All work of the transfer must run after the work already issued on the first stream. It must also run before any
        work that is issued on the second stream later.
        """

    def warm_up(self, plan: Plan) -> None:
        """Compile and upload everything that plans of the same programs need, for any number of units; move nothing."""

    def write(self, transfer: GpuTransfer, plan: Plan, begin: int, end: int) -> tuple[Int64Array, int]:
        """Write down the calls that move a transfer's bytes, or those of a group of its layers; count them.

        Args:
            transfer: the transfer.
            plan: its plan, or that of the next group of layers; it has bytes.
            begin: event to record in front of all; 0 for none.
            end: event to record behind all.

        Returns:
            The calls: (n, 8) int64, see :mod:`kvplan.cuda.rows`. And their effort: calls and copies in batches, about a
            microsecond of CPU time each.
        """


def refuse_kernels(name: str, sides: Sides) -> KVPlanError | None:
    """Return the error of a plan whose memory kernels do not reach, or of a machine without Triton; else None."""
    if sides.by_kernels:
        return None
    if sides.unreachable:
        return PathError(f"path {name!r} cannot serve this plan: {sides.unreachable}")
    if sides.route in HOST_ROUTES and sides.devices != (sides.here,):
        others = ", ".join(sides.devices)
        return PathError(f"path {name!r} reaches {sides.here} and pinned memory; the plan is of {others}")
    if sides.pageable:
        text = f"path {name!r} reaches pinned memory only: {sides.pageable}; pin it (kvplan.allocate, torch's "
        return HostMemoryError(text + "pin_memory, cudaHostRegister) or take path 'copy_engine'")
    return PathError(f"path {name!r} needs Triton, which is not installed: pip install triton")


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
