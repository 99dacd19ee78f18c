"""A peer: another process, from which this process reads and to which it writes."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real

from kvplan.base.integers import integer
from kvplan.errors import KVPlanError, LayoutError, PathError, TransferError
from kvplan.layout.kvlayout import KVLayout
from kvplan.nixl.nixl_connection import Connection, spans_of
from kvplan.nixl.nixl_transfer import READ, WRITE, NixlTransfer
from kvplan.plan.by_pair import ByPair
from kvplan.plan.plan import Plan


class NixlPeer:
    """Another process that this process is connected to. :meth:`NixlAgent.meet` returns it.

    Attributes:
        name: the peer's name.
        layouts: the peer's layouts by name, to compile against; their addresses are the peer's.
    """

    def __init__(self, connection: Connection, layouts: Mapping[str, KVLayout]) -> None:
        self.name = connection.name
        self.layouts = dict(layouts)
        self.connection = connection
        self._spans = spans_of(self.layouts.values())
        self._operations = ByPair[str]()

    def submit(
        self, plan: Plan, *, note: bytes = b"", attempts: int = 1, deadline: float | None = None
    ) -> NixlTransfer:
        """Begin a transfer and return at once.

        Args:
            plan: a plan between registered layouts of this process and layouts of the peer. NIXL keeps no order between
                transfers: first wait for all other work on the memory.
            note: bytes for the peer, sent when the last byte has moved; it reads them with :meth:`NixlAgent.notes`.
            attempts: number of attempts in total. The connection is renewed between two attempts.
            deadline: seconds until the transfer is given up. Without a deadline, a hanging peer is never noticed.

        Raises:
            KVPlanError: ``plan`` is not a plan, ``note`` is not bytes, or a number is out of range.
            PathError: the plan is not between this process and this peer, or one side has memory of two kinds.
            LayoutError: the destination is read-only.
            TransferError: the agent is closed, or the peer was removed.
        """
        self.connection.end.check_open()
        if not isinstance(plan, Plan):
            raise KVPlanError(f"plan is a {type(plan).__name__}; submit takes what CopyProgram.plan or join made")
        if not isinstance(note, bytes):
            raise KVPlanError(f"note is a {type(note).__name__}; give bytes")
        right = "a transfer is tried at least once"
        attempts = integer("attempts", attempts, least=1, right=right, error=KVPlanError)
        if deadline is not None and (isinstance(deadline, bool) or not isinstance(deadline, Real) or not deadline > 0):
            raise KVPlanError(f"deadline is {deadline!r}; give a positive number of seconds, or None")
        return self.post(plan, note=note, attempts=attempts, deadline=deadline)

    def post(self, plan: Plan, *, note: bytes, attempts: int, deadline: float | None) -> NixlTransfer:
        """Begin a transfer; the arguments but the plan's layouts are right. See :meth:`submit`."""
        operation = self._operations.get(plan) or self._operations.keep(plan, self._operation(plan))
        end = self.connection.end
        with end.lock:
            end.check_open()
            if self.connection.forgotten:
                raise TransferError(f"the peer {self.name!r} was forgotten; meet it again, by a new card")
            transfer = NixlTransfer(self.connection, plan, operation, note=note, attempts=attempts, deadline=deadline)
            transfer.begin()
        return transfer

    def _operation(self, plan: Plan) -> str:
        """Check a plan's layouts; return ``"READ"`` if it reads from the peer, ``"WRITE"`` if it writes to it."""
        here = self.connection.end
        sides = []
        for k, side in enumerate(("src", "dst")):
            layouts = [pair[k] for pair in plan.layouts]
            whose = {layout.addresses for layout in layouts}
            known = here.spans if whose == {"memory"} else self._spans
            if whose not in ({"memory"}, {"dump"}) or not spans_of(layouts) <= known:
                raise PathError(
                    f"{side} of {plan!r} is neither a layout that {here.name!r} registered nor one of the card "
                    f"of {self.name!r}; compile with agent.layouts on one side and peer.layouts on the other"
                )
            sides.append(whose.pop())
        if sides[0] == sides[1]:
            where = "of this process" if sides[0] == "memory" else f"of {self.name!r}"
            raise PathError(f"both sides of {plan!r} are memory {where}; NIXL moves between two processes")
        for _, dst in plan.layouts:
            if not dst.writable:
                raise LayoutError(f"the destination {dst!r} is read-only")
        return READ if sides[0] == "dump" else WRITE

    def __repr__(self) -> str:
        return f"NixlPeer({self.name!r}, layouts {list(self.layouts)})"
