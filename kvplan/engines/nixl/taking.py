"""The state of an agent, and its choice of the transfers that kvplan moves."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvplan.engines.nixl.agent_peers import UNPACKED, AgentPeers, told
from kvplan.engines.nixl.chosen_rows import chosen_rows, indices
from kvplan.engines.nixl.packed_options import PackedOptions
from kvplan.engines.nixl.packed_peers import PackedPeer
from kvplan.engines.nixl.transfer_handles import PreparedList, TakenTransfer
from kvplan.errors import TransferError
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.strides import Int64Array
from kvplan.plan import loops
from kvplan.plan.plan import Plan
from kvplan.plan.row_plans import RowProgram

OPERATIONS = ("READ", "WRITE")
log = logging.getLogger("kvplan.engines.nixl")


class State(AgentPeers):
    """The state of an agent: NIXL's agent, the registered memory, the peers, and the choice of transfers.

    Args:
        real: NIXL's agent.
        config: its config, or None.
        options: when transfers are packed.

    Attributes:
        telemetry: whether figures of transfers are asked for.
    """

    def __init__(self, real: Any, config: Any, options: PackedOptions = UNPACKED) -> None:
        super().__init__(real, options)
        self.telemetry = config is None or bool(getattr(config, "capture_telemetry", True))

    # Transfers.

    def place(self, made: PreparedList) -> None:
        """Look up where the rows of a list lie in this process."""
        if made.rows is None:
            return
        with self._lock:
            version = self._registered.version
            try:
                if not made.peer:
                    made.placed = self.local().place(made.rows)
                for neighbour in self.candidates(made.peer):
                    if made.placed is None:
                        made.neighbour, made.placed = neighbour, neighbour.spans.place(made.rows)
            except Exception as error:  # noqa: BLE001  # NIXL moves such rows
                log.warning("NIXL moves transfers of a list: %s", told(error))
                made.placed = None
            made.version = version

    def prepare(self, made: PreparedList) -> None:
        """Warm up for a list's rows, so that the first transfer does not wait for compilers."""
        neighbour, there = made.neighbour, made.placed
        try:
            if not made.peer and there is not None and self.packed is not None:
                self.packed.prepare(there)
            if neighbour is None:
                return
            with self._lock:
                local = self.local()
            here = local.first("VRAM") or local.first("DRAM")
            if there is not None and here is not None:
                size = int(there.rows.size[0])
                rows = (there.rows.address[:1], np.array([here.here]))
                neighbour.prepare(self._program(there.layout, here.layout).plan(*rows, size, there.rows.alignment))
            if loops.loaded is not None:
                from kvplan.engines.nixl import row_loops  # imports numba

                row_loops.load()
        except Exception as error:  # noqa: BLE001  # the first transfer compiles, or is refused
            log.warning("the first transfer with %s may wait: %s", made.peer or "a peer", told(error))

    def take(
        self, operation: str, lists: Sequence[Any], chosen: tuple[Any, Any], note: Any, by_nixl: Callable[..., Any]
    ) -> TakenTransfer | None:
        """Return a transfer that kvplan moves; None if NIXL must make it, or refuse it.

        Args:
            operation: ``"READ"`` or ``"WRITE"``.
            lists: the list of this process's memory, and the list of the peer's.
            chosen: the indices of descriptors in each list.
            note: notification for the peer.
            by_nixl: makes the transfer by NIXL, of a notification and the indices in each list.
        """
        try:
            return self._take(operation, lists, chosen, note, by_nixl)
        except Exception as error:  # noqa: BLE001  # NIXL makes it, or refuses it
            log.warning("NIXL moves a transfer: %s", told(error))
            return None

    def _take(
        self, operation: str, lists: Sequence[Any], chosen: tuple[Any, Any], note: Any, by_nixl: Callable[..., Any]
    ) -> TakenTransfer | None:
        local, remote = lists
        if not isinstance(local, PreparedList) or not isinstance(remote, PreparedList) or operation not in OPERATIONS:
            return None
        neighbour = remote.neighbour
        if neighbour is None or not self.knows(neighbour) or local.peer:
            return None
        if local.version != self._registered.version:
            self.place(local)
        here, there = local.placed, remote.placed
        if here is None or there is None:
            return None
        src, dst = (there, here) if operation == "READ" else (here, there)
        program = self._program(src.layout, dst.layout)
        alignment, size = min(here.rows.alignment, there.rows.alignment), here.rows.one_size
        if size and size == there.rows.one_size:
            rows = chosen_rows(operation, here.rows, there.rows, chosen)
            if rows is not None:
                plan = rows.plan(program, size, alignment)
                return self._taken(remote, plan, rows.pass_on(by_nixl), note)
        at, to = indices(chosen[0], len(here.rows)), indices(chosen[1], len(there.rows))
        if at is None or to is None or at.size != to.size:
            return None
        sizes: int | Int64Array = size
        if not size or size != there.rows.one_size:
            sizes = here.rows.sizes(at)
            if not np.array_equal(sizes, there.rows.sizes(to)):
                return None
        sides = here.rows.addresses(at), there.rows.addresses(to)
        plan = program.plan(*(sides if operation == "WRITE" else sides[::-1]), sizes, alignment)
        return self._taken(remote, plan, lambda note: by_nixl(note, at, to), note)

    def _taken(
        self, remote: PreparedList, plan: Plan, pass_on: Callable[[bytes], Any], note: Any
    ) -> TakenTransfer | None:
        assert remote.neighbour is not None  # the caller has checked it
        if isinstance(remote.neighbour, PackedPeer) and not remote.neighbour.wants(plan):
            return None
        removals = self.removals(remote.peer)
        return TakenTransfer(self, remote.neighbour, remote.peer, plan, plan.units, bytes_of(note), pass_on, removals)

    def _program(self, src: KVLayout, dst: KVLayout) -> RowProgram:
        key = id(src), id(dst)
        known = self._programs.get(key)
        if known is None or known.src is not src or known.dst is not dst:
            known = self._programs[key] = RowProgram(src, dst)
        return known

    # What transfers need.

    def error(self, kind: str, why: str) -> Exception:
        """Return NIXL's exception of a kind, with NIXL's text in front; TransferError if this NIXL has none."""
        module = sys.modules.get(type(self.real).__module__)
        made = getattr(getattr(module, "nixlBind", module), f"nixl{kind}Error", TransferError)
        words = "".join(f"_{letter}" if letter.isupper() else letter for letter in kind).upper()
        found: Exception = made(f"NIXL_ERR{words}: {why}")
        return found

    def own(self, made: PreparedList) -> Any:
        """Return NIXL's handle of a list."""
        if made.own is None:
            raise self.error("InvalidParam", "the descriptor list was released")
        return made.own

    def post(self, handle: Any, note: bytes) -> str:
        """Post a transfer of NIXL; return its state."""
        state: str = self.real.transfer(handle, note)
        return state


def bytes_of(note: Any) -> bytes:
    """Return a notification as bytes; raise TypeError if it is neither a text nor bytes, as NIXL does."""
    return note.encode() if isinstance(note, str) else bytes(memoryview(note))
