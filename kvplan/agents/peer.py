"""A peer: another process that this one has met, whose layouts it reads and writes."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from kvplan.agents.board import checked_note
from kvplan.agents.connection import Link
from kvplan.agents.local_memory import NIXL, regions_of
from kvplan.agents.peer_transfer import BOUND, LatchedTransfer, Line, Order, PeerTransfer
from kvplan.base.values import listed, quoted
from kvplan.errors import KVPlanError, LayoutError, PathError
from kvplan.execute.executor import PRIORITIES
from kvplan.execute.transfer import Transfer, check_after
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.plan import Plan, PlannedBy

if TYPE_CHECKING:
    from kvplan.agents.board import VisitorOrder
    from kvplan.agents.by_nixl.nixl_link import NixlLink
    from kvplan.execute.executor import Executor

# Defaults are compared by identity, since each call of a submit counts.
NORMAL, AUTO = "normal", "auto"
WAYS = (AUTO, "direct", "packed")


class _Route(NamedTuple):
    """How plans between two layouts go.

    Attributes:
        reading: whether they read from the peer.
        transport: the transport.
        executor: what moves the bytes; None over NIXL.
        lines: those before them, of normal and of high priority.
        order: what counts their ends on the GPU, or None.
    """

    reading: bool
    transport: str
    executor: Executor | None = None
    lines: tuple[Line, ...] = ()
    order: VisitorOrder | None = None


class Peer:
    """Another process that this one has met. :meth:`kvplan.Agent.meet` returns it.

    Attributes:
        name: name of its agent.
        layouts: its layouts by name, to compile against. Over ``cuda_ipc`` and ``shm`` their addresses are this
            process's mappings of the peer's memory; over ``nixl`` they are the peer's own.
        transport: name of the transport that moves the bytes; several are joined by ``+``.
    """

    def __init__(
        self, name: str, agent: Any, link: Link | None, nixl: NixlLink | None,
        layouts: Mapping[str, tuple[str, KVLayout]],
    ) -> None:  # fmt: skip
        self.name, self.agent, self.link, self.nixl = name, agent, link, nixl
        self.layouts: dict[str, KVLayout] = {key: layout for key, (_, layout) in layouts.items()}
        self.transport = "+".join(dict.fromkeys(transport for transport, _ in layouts.values()))
        # The transport of each region, also by whose addresses it has: over NIXL they are the peer's, and its memory
        # may lie where this process has memory of the same size.
        self._theirs: dict[tuple[str, int, int, str], str] = {}
        for transport, layout in layouts.values():
            whose = layout.addresses
            self._theirs |= {(whose, r.address, r.nbytes, r.device): transport for r in regions_of([layout])}
        self._routes: WeakKeyDictionary[PlannedBy, _Route] = WeakKeyDictionary()  # of plans of one program

    def submit(
        self, plan: Plan, *, after: Any = None, note: bytes = b"", deadline: float | None = BOUND,
        by_layer: bool = False, priority: str = NORMAL, way: str = AUTO,
    ) -> LatchedTransfer:  # fmt: skip
        """Begin a transfer, and return at once.

        Args:
            plan: a plan between layouts of this process and layouts of the peer.
            after: a stream, an event, a Transfer, or None: the transfer begins when this has completed. For a packed
                push with ``by_layer=True``, also a mapping from layers to such objects, recorded before: each layer is
                sent when its object has completed, and one without an object, or with None, behind the layer before
                it. A mapping without layers is None.
            note: at most 60,000 bytes for the peer, sent when the last byte has moved; :meth:`kvplan.Agent.notes`
                returns it there. Notes of transfers of one direction and priority come in the order of the submits.
            deadline: seconds until the transfer is given up: cancelled if it has not begun, and otherwise ended with
                an error, although its bytes may still move. By default, a packed transfer is given up when nothing of
                it has moved for 30 seconds since it could have begun. Another one is given up 30 seconds, and 10
                seconds a GB, after those before it have ended, but never if it has an ``after=``; a direct transfer
                by ``nixl`` that long after it was posted, also with ``after=``. None is for never.
            by_layer: whether to move layers in their order; see :meth:`kvplan.Executor.submit`. The direct way of NIXL
                ignores it.
            priority: ``"high"`` or ``"normal"``; see :meth:`kvplan.Executor.submit`. The direct way of NIXL ignores it.
            way: over ``nixl``, ``"direct"`` posts a descriptor for each piece of memory; ``"packed"`` gathers pieces
                into a few large messages, and the other end scatters them; ``"auto"`` takes the faster one.

        Raises:
            KVPlanError: ``plan`` is not a plan, ``note`` is not bytes, or another argument is wrong.
            PathError: the plan is not between this process and this peer, or no path can serve it.
            LayoutError: the destination is read-only.
            TransferError: the peer died, closes or was forgotten; or the agent is closed.

        >>> import kvplan, numpy as np
        >>> like = kvplan.KVLayout.from_tensors("block dim", np.zeros((4, 8), np.int8))
        >>> pool = kvplan.allocate("block dim", like=like, shared=True)
        >>> with kvplan.Agent("pool", {"kv": pool}) as owner, kvplan.Agent("worker", {}) as worker:
        ...     peer = worker.meet(owner.card())
        ...     store = kvplan.compile(like, peer.layouts["kv"]).plan([0, 1], [2, 3])
        ...     peer.submit(store, note=b"blocks 2 and 3").result().nbytes
        ...     owner.notes()
        16
        [('worker', b'blocks 2 and 3')]
        """
        self.agent.check_open()
        if not isinstance(plan, Plan):
            raise KVPlanError(f"plan is a {type(plan).__name__}; submit takes what CopyProgram.plan or join made")
        checked_note(note)
        if deadline is not None and (isinstance(deadline, bool) or not isinstance(deadline, Real) or not deadline > 0):
            raise KVPlanError(f"deadline is {deadline!r}; give a positive number of seconds, or None")
        if isinstance(after, tuple | Mapping) and not after:
            after = None
        if priority is not NORMAL and priority not in PRIORITIES:
            raise KVPlanError(f"priority is {priority!r}; give 'high' or 'normal'")
        if way not in WAYS:
            raise PathError(f"unknown way {quoted(way)}; expected one of {listed(WAYS)}")
        route = self._route(plan)
        order = Order(plan, self.name, route.reading, note, deadline, after, by_layer, priority == "high")
        if isinstance(after, Mapping):
            if route.transport != NIXL or way == "direct":
                raise KVPlanError(
                    "after is a mapping of layers, which packed pushes over 'nixl' take; submit each layer by itself, "
                    "with its own after="
                )
            way = "packed"
        if self.nixl is not None and route.executor is None:
            return self.nixl.submit(order, way, self.agent.tally)
        if way == "packed":
            raise PathError(f"nothing is packed over {route.transport!r}; the way 'packed' is for layouts over 'nixl'")
        return self._submit(order, route)

    def prepare(self, plan: Plan) -> None:
        """Warm up for plans like this one, so that the first transfer compiles nothing; over NIXL, do nothing.

        Raises:
            KVPlanError: as :meth:`submit`.
        """
        if (executor := self._route(plan).executor) is not None:
            executor.prepare(plan)

    @property
    def gone(self) -> str | None:
        """Why it takes no more transfers; None if it does. NIXL itself tells who is gone."""
        return None if self.link is None else self.link.death() or self.link.why

    def send(self, note: bytes) -> None:
        """Send a note now, behind the notes of transfers that have ended.

        Over NIXL, a note by itself may be lost if this process ends or closes its agent soon after it.

        Raises:
            KVPlanError: ``note`` is not bytes, or is too long.
            TransferError: the peer died, closes or was forgotten.
        """
        self.agent.check_open()
        way = self.link or self.nixl
        if way is not None:
            way.send(checked_note(note))

    def _submit(self, order: Order, route: _Route) -> PeerTransfer:
        link, executor, after, gpu_order = self.link, route.executor, order.after, route.order
        assert link is not None  # the transport is a local one
        assert executor is not None
        if order.note:
            link.check_open()
            link.notes.check_room()
        if after is not None:
            check_after(after, gpu=executor.device != "cpu")
            if isinstance(after, PeerTransfer) and after.on_gpu:
                after = after.inner

        def start() -> Transfer:
            waits = after if gpu_order is None else gpu_order.behind_published(after)
            # What Executor.submit checks first, the peer's submit has checked, or the backend checks again.
            return executor._submit(order.plan, waits, by_layer=order.by_layer, urgent=order.urgent)

        transfer = PeerTransfer(order, link, gpu_order, self.agent.tally, route.lines[order.urgent])
        transfer.launch(start)
        return transfer

    def _route(self, plan: Plan) -> _Route:
        """Return how a plan goes; raise PathError if it is not with this peer."""
        if len(plan.programs) != 1:
            return self._new_route(plan)
        route = self._routes.get(plan.programs[0])
        if route is None:
            route = self._routes[plan.programs[0]] = self._new_route(plan)
        return route

    def _new_route(self, plan: Plan) -> _Route:
        src, dst = (self._transport(plan, side) for side in (0, 1))
        if (src is None) == (dst is None):
            where = "neither side of {} is" if src is None else "both sides of {} are"
            raise PathError(
                f"{where.format(repr(plan))} memory of {self.name!r}; compile with a layout of this process on one "
                "side, and one of peer.layouts on the other"
            )
        for _, layout in plan.layouts:
            if not layout.writable:
                raise LayoutError(f"the destination {layout!r} is read-only")
        reading, transport, agent, link = src is not None, src or str(dst), self.agent, self.link
        if transport == NIXL or link is None:
            return _Route(reading, NIXL)
        gpu = link.opened[transport].gpu
        executor = agent.executor_for(plan) if gpu is None else agent.executor_on(f"cuda:{gpu}")
        lines = tuple([agent.lines.line((id(executor), urgent, plan.direction)) for urgent in (False, True)])
        return _Route(reading, transport, executor, lines, None if gpu is None else link.order)

    def _transport(self, plan: Plan, side: int) -> str | None:
        """Return the transport of one side of a plan, or None if it is not the peer's."""
        kinds = set()
        for layout in {id(pair[side]): pair[side] for pair in plan.layouts}.values():
            whose = layout.addresses
            some = {self._theirs.get((whose, r.address, r.nbytes, r.device)) for r in layout.regions}
            if len(some) > 1 or (None in some and whose != "memory"):
                raise PathError(
                    f"{layout!r} is neither memory of this process nor of {self.name!r}; compile with peer.layouts, "
                    "which the newest card made"
                )
            kinds |= some
        if len(kinds) > 1:
            name = ("source", "destination")[side]
            raise PathError(f"the {name} of {plan!r} is partly memory of {self.name!r}; submit each part by itself")
        return kinds.pop()

    def __repr__(self) -> str:
        return f"Peer({self.name!r}, layouts {list(self.layouts)}, by {self.transport})"
