"""A peer: another process that this one has met, whose layouts it reads and writes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from kvplan.agents.link import Link, checked_note
from kvplan.agents.packed.packed_transfer import PackedTransfer
from kvplan.agents.peer_transfer import BOUND, Line, Order, PeerTransfer
from kvplan.agents.relocation import regions_of
from kvplan.agents.transport import NIXL
from kvplan.base.values import listed, quoted
from kvplan.errors import KVPlanError, LayoutError, PathError
from kvplan.execute.executor import PRIORITIES
from kvplan.execute.transfer import Transfer, check_after
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.plan import Plan, PlannedBy

if TYPE_CHECKING:
    from kvplan.agents.by_nixl.nixl_link import NixlLink
    from kvplan.agents.core import Core
    from kvplan.agents.gpu_order import VisitorOrder
    from kvplan.execute.executor import Executor

# Defaults are compared by identity, since each call of a submit counts.
NORMAL, AUTO = "normal", "auto"
_LAYERS = "after is a mapping of layers, which packed pushes over 'nixl' take;"
_EACH = "submit each layer by itself, with its own after="
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
        self, name: str, core: Core, link: Link | None, nixl: NixlLink | None, held: Mapping[str, tuple[str, KVLayout]]
    ) -> None:
        self.name = name
        self.layouts: dict[str, KVLayout] = {key: layout for key, (_, layout) in held.items()}
        self.transport = "+".join(dict.fromkeys(transport for transport, _ in held.values()))
        self.core, self.link, self.nixl = core, link, nixl
        # The transport of each region, also by whose addresses it has: over NIXL they are the peer's, and its memory
        # may lie where this process has memory of the same size.
        self._theirs: dict[tuple[str, int, int, str], str] = {}
        for transport, layout in held.values():
            whose = layout.addresses
            self._theirs |= {(whose, r.address, r.nbytes, r.device): transport for r in regions_of([layout])}
        self._routes: WeakKeyDictionary[PlannedBy, _Route] = WeakKeyDictionary()  # of plans of one program

    def submit(
        self,
        plan: Plan,
        *,
        after: Any = None,
        note: bytes = b"",
        deadline: float | None = BOUND,
        by_layer: bool = False,
        priority: str = NORMAL,
        way: str = AUTO,
    ) -> PeerTransfer | PackedTransfer:
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
                seconds a GB, after those before it have ended; but never if it has an ``after=``. None is for never.
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
        core = self.core
        core.check_open()
        if not isinstance(plan, Plan):
            raise KVPlanError(f"plan is a {type(plan).__name__}; submit takes what CopyProgram.plan or join made")
        checked_note(note)
        if deadline is not None and (isinstance(deadline, bool) or not isinstance(deadline, Real) or not deadline > 0):
            raise KVPlanError(f"deadline is {deadline!r}; give a positive number of seconds, or None")
        if after is not None and isinstance(after, (tuple, Mapping)) and not after:
            after = None
        if priority is not NORMAL and (not isinstance(priority, str) or priority not in PRIORITIES):
            raise KVPlanError(f"priority is {priority!r}; give 'high' or 'normal'")
        if way is not AUTO and (not isinstance(way, str) or way not in WAYS):
            raise PathError(f"unknown way {quoted(way)}; expected one of {listed(WAYS)}")
        route = self._route(plan)
        until = None if deadline is None or deadline is BOUND else time.monotonic() + float(deadline)
        order = Order(plan, self.name, route.reading, note, deadline, until, after, priority == "high")
        if isinstance(after, Mapping):
            way = _packed_by_layer(route.transport, way)
        if route.executor is None:
            return self._submit_nixl(order, by_layer=by_layer, priority=priority, way=way)
        if way == "packed":
            raise PathError(f"nothing is packed over {route.transport!r}; the way 'packed' is for layouts over 'nixl'")
        return self._submit(order, route, route.executor, by_layer=by_layer)

    def explain(self, plan: Plan) -> str:
        """Return in one line how a plan would be moved, and why.

        Raises:
            KVPlanError: ``plan`` is not a plan.
            PathError: the plan is not between this process and this peer.
            LayoutError: the destination is read-only.

        >>> import kvplan, numpy as np
        >>> like = kvplan.KVLayout.from_tensors("block dim", np.zeros((4, 8), np.int8))
        >>> pool = kvplan.allocate("block dim", like=like, shared=True)
        >>> with kvplan.Agent("pool", {"kv": pool}) as owner, kvplan.Agent("worker", {}) as worker:
        ...     peer = worker.meet(owner.card())
        ...     peer.explain(kvplan.compile(like, peer.layouts["kv"]).plan([0], [2]))
        "by shm: this process's executor moves the bytes; see Executor.explain"
        """
        if not isinstance(plan, Plan):
            raise KVPlanError(f"plan is a {type(plan).__name__}; explain takes what CopyProgram.plan or join made")
        route = self._route(plan)
        if route.executor is not None or self.nixl is None:
            return f"by {route.transport}: this process's executor moves the bytes; see Executor.explain"
        way, why = self.nixl.way_of(plan, reading=route.reading)
        return f"by nixl, {way}: {why}"

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
        return None if self.link is None else self.link.lost() or self.link.why

    def send(self, note: bytes) -> None:
        """Send a note now, behind the notes of transfers that have ended.

        Over NIXL, a note by itself may be lost if this process ends or closes its agent soon after it.

        Raises:
            KVPlanError: ``note`` is not bytes, or is too long.
            TransferError: the peer died, closes or was forgotten.
        """
        self.core.check_open()
        checked_note(note)
        if self.link is not None:
            self.link.send(note)
        elif self.nixl is not None:
            self.nixl.send_note(note)

    def _submit(self, order: Order, route: _Route, executor: Executor, *, by_layer: bool) -> PeerTransfer:
        link, plan, after, gpu_order = self.link, order.plan, order.after, route.order
        assert link is not None  # the transport is a local one
        if order.note:
            link.check_room()
        if after is not None:
            check_after(after, gpu=executor.device != "cpu")
            if isinstance(after, PeerTransfer) and after.on_gpu:
                after = after.inner

        def start() -> Transfer:
            waits = after if gpu_order is None else gpu_order.behind_published(after)
            # What Executor.submit checks first, the peer's submit has checked, or the backend checks again.
            return executor._submit(plan, waits, by_layer=by_layer, urgent=order.urgent)

        transfer = PeerTransfer(order, link, gpu_order, self.core.tally, start, route.lines[order.urgent])
        transfer.launch()
        return transfer

    def _submit_nixl(self, order: Order, *, by_layer: bool, priority: str, way: str) -> PeerTransfer | PackedTransfer:
        core, nixl = self.core, self.nixl
        assert nixl is not None  # the transport is NIXL
        if way == "packed" and (why := nixl.why_not_packed(order.plan, reading=order.reading)) is not None:
            layers = f"; {_LAYERS} {_EACH}" if isinstance(order.after, Mapping) else ""
            raise PathError(f"{order.plan!r} cannot be packed: {why}{layers}")
        if way == "auto" and not nixl.direct_at_once(order.plan, reading=order.reading):
            way, _ = nixl.way_of(order.plan, reading=order.reading)
        if way == "packed":
            return nixl.pack(order, by_layer=by_layer, priority=priority)
        if order.after is not None:
            check_after(order.after, gpu=True)
        line = Line(core.lines)  # of its own: NIXL's transfers end in any order
        until = None if order.after is None else order.until  # NIXL itself keeps the deadline of what it has
        own = order._replace(note=b"", deadline=None if order.deadline is BOUND else order.deadline, until=until)
        transfer = PeerTransfer(own, nixl, None, core.tally, lambda: nixl.start(order), line)
        transfer.launch(deferred=order.after is not None)
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
        reading, transport, core, link = src is not None, src or str(dst), self.core, self.link
        if transport == NIXL or link is None:
            return _Route(reading, NIXL)
        gpu = link.opened[transport].gpu
        executor = core.executor_for(plan) if gpu is None else core.executor_on(f"cuda:{gpu}")
        lines = tuple([core.lines.line((id(executor), urgent, plan.direction)) for urgent in (False, True)])
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


def _packed_by_layer(transport: str, way: str) -> str:
    """Return the way of a submit whose ``after=`` is a mapping of layers; raise KVPlanError if it is another way."""
    if transport == NIXL and way != "direct":
        return "packed"
    by = f"over {transport!r}" if transport != NIXL else "by the way 'direct'"
    raise KVPlanError(f"{_LAYERS} {by}, {_EACH}")
