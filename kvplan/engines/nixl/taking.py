"""The state of an agent, and its choice of the transfers that kvplan moves."""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvplan.engines.nixl.chosen_rows import chosen_rows, indices
from kvplan.engines.nixl.descriptor_rows import Rows, rows_of
from kvplan.engines.nixl.neighbours import Neighbourhood, card_of
from kvplan.engines.nixl.packed_options import NEVER, PackedOptions
from kvplan.engines.nixl.packed_peers import PackedPeer, PackedPeers
from kvplan.engines.nixl.spans import Registered, Spans
from kvplan.engines.nixl.standalone import StandaloneAgent
from kvplan.engines.nixl.transfer_handles import Neighbour, PreparedList, TakenTransfer
from kvplan.errors import KVPlanError, PathError, TransferError
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.strides import Int64Array
from kvplan.plan import loops
from kvplan.plan.plan import Plan
from kvplan.plan.row_plans import RowProgram

OPERATIONS = ("READ", "WRITE")
UNPACKED = PackedOptions(NEVER)
log = logging.getLogger("kvplan.engines.nixl")


class State:
    """The state of an agent: NIXL's agent, the registered memory, and the peers of this machine.

    Args:
        real: NIXL's agent.
        config: its config, or None.
        options: when transfers are packed.

    Attributes:
        real: as given.
        packed: peers whose transfers are packed; None if no transfer is.
        telemetry: whether figures of transfers are asked for.
        neighbours: by name, peers whose memory is open here.
    """

    def __init__(self, real: Any, config: Any, options: PackedOptions = UNPACKED) -> None:
        self.real = real
        self.telemetry = config is None or bool(getattr(config, "capture_telemetry", True))
        self.neighbours: dict[str, Neighbour] = {}
        self._cards: dict[str, bytes | None] = {}
        self._registered = Registered()
        name = str(getattr(real, "name", ""))
        self._around = Neighbourhood(name)
        self.packed = packed_peers(name, real, options)
        self._lock = threading.RLock()
        self._programs: dict[tuple[int, int], RowProgram] = {}
        self._removals: Counter[str] = Counter()

    # Memory and peers.

    def rows(self, read: Any) -> Rows | None:
        """Return the rows that ``read`` reads; None if kvplan cannot move such rows."""
        try:
            found: Rows = read()
        except Exception as error:  # noqa: BLE001  # NIXL judges the list
            log.debug("left to NIXL: %s: %s", type(error).__name__, error)
            return None
        return found

    def remember(self, descriptors: Any) -> None:
        """Remember registered memory."""
        rows = self.rows(lambda: rows_of(descriptors))
        if rows is not None:
            with self._lock:
                self._registered.add(rows)
                self._programs.clear()

    def forget(self, descriptors: Any) -> None:
        """Forget memory, and withdraw the offers of it."""
        rows = self.rows(lambda: rows_of(descriptors))
        if rows is None:
            return
        with self._lock:
            self._registered.remove(rows)
            self._programs.clear()
            left = self._registered.union()
            waits = [self._around.withdraw(left)]
            if self.packed is not None:
                waits.append(self.packed.withdraw(self._local().layouts))
        for wait in waits:
            wait()

    def card(self) -> bytes | None:
        """Return the card that offers the registered memory; None if there is nothing to offer."""
        with self._lock:
            try:
                packed = 0 if self.packed is None else self.packed.serve(self._local().layouts)
                return self._around.card(self._registered.union(), self._registered.version, packed)
            except Exception as error:  # noqa: BLE001  # NIXL's metadata is enough
                log.warning("kvplan offers no memory to peers, NIXL moves all transfers: %s", _told(error))
                return None

    def met(self, name: str, card: bytes | None) -> None:
        """Open the memory of a peer that was added, if its card is of this machine."""
        with self._lock:
            if self.packed is not None:
                self.packed.met(name, card)
            known = self.neighbours.get(name)
            if known is not None and card == self._cards.get(name) and not known.gone():
                return
            self._shut(name)
            if card is None or (self.packed is not None and self.packed.always):
                return
            try:
                neighbour = self._around.meet(name, card_of(name, card))
            except Exception as error:  # noqa: BLE001  # NIXL serves the peer
                log.info("transfers with %s go by NIXL: %s", name, _told(error))
                return
            self.neighbours[name], self._cards[name] = neighbour, card
        log.info("kvplan takes over transfers with %s: %s; all others go by NIXL", name, neighbour.words)

    def leave(self, name: str) -> None:
        """Let go of a peer's memory, and part from it."""
        self._shut(name)
        if self.packed is not None:
            self.packed.leave(name)

    def _shut(self, name: str) -> None:
        with self._lock:
            neighbour = self.neighbours.pop(name, None)
            self._cards.pop(name, None)
            self._programs.clear()
        if neighbour is not None:
            try:
                neighbour.close()
            except Exception as error:  # noqa: BLE001  # it closes once its transfers have ended
                log.warning("the memory of %s is still open: %s", name, _told(error))

    def removed(self, name: str) -> None:
        """Let go of a peer that was removed: transfers made before can no longer be posted, as with NIXL."""
        self._removals[name] += 1
        self._shut(name)
        if self.packed is not None:
            self.packed.removed(name)

    def serves(self, name: str) -> bool:
        """Return whether kvplan moves some transfers with a peer."""
        return name in self.neighbours or (self.packed is not None and name in self.packed.peers)

    def removals(self, peer: str) -> int:
        """Return how often a peer was removed."""
        return self._removals[peer]

    # Transfers.

    def place(self, made: PreparedList) -> None:
        """Look up where the rows of a list lie in this process."""
        if made.rows is None:
            return
        with self._lock:
            version = self._registered.version
            try:
                if not made.peer:
                    made.placed = self._local().place(made.rows)
                for neighbour in self._candidates(made.peer):
                    if made.placed is None:
                        made.neighbour, made.placed = neighbour, neighbour.spans.place(made.rows)
            except Exception as error:  # noqa: BLE001  # NIXL moves such rows
                log.warning("NIXL moves transfers of a list: %s", _told(error))
                made.placed = None
            made.version = version

    def _candidates(self, name: str) -> list[Neighbour]:
        packed = {} if self.packed is None else self.packed.peers
        return [peers[name] for peers in (self.neighbours, packed) if name in peers]

    def prepare(self, made: PreparedList) -> None:
        """Warm up for reads of a peer's rows, so that the first transfer does not wait for compilers."""
        neighbour, there = made.neighbour, made.placed
        if neighbour is None:
            return
        try:
            with self._lock:
                local = self._local()
            here = local.first("VRAM") or local.first("DRAM")
            if there is not None and here is not None:
                size = int(there.rows.size[0])
                rows = (there.rows.address[:1], np.array([here.here]))
                neighbour.prepare(self._program(there.layout, here.layout).plan(*rows, size, there.rows.alignment))
            if loops.loaded is not None:
                from kvplan.engines.nixl import row_loops  # imports numba

                row_loops.load()
        except Exception as error:  # noqa: BLE001  # the first transfer compiles, or is refused
            log.warning("the first transfer with %s will wait: %s", neighbour.name, _told(error))

    def _local(self) -> Spans:
        return self._around.spans(self._registered.union(), self._registered.version)

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
            log.warning("NIXL moves a transfer: %s", _told(error))
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
            rows = chosen_rows(operation, here.rows, there.rows, chosen, neighbour.executor(src.layout, dst.layout))
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

    def notify(self, peer: str, note: bytes, backend: Any = None) -> None:
        """Send a notification by NIXL; without it, by kvplan."""
        if not isinstance(self.real, StandaloneAgent):
            self.real.send_notif(peer, note, backend)
        elif peer in self.neighbours:
            self.neighbours[peer].send(note)
        else:
            raise PathError(f"no peer {peer!r} of this machine has been added")

    def notes(self, backends: list[str]) -> dict[str, list[bytes]]:
        """Return new notifications, by the names of peers."""
        if self.packed is None and not isinstance(self.real, StandaloneAgent):
            found: dict[str, list[bytes]] = self.real.get_new_notifs(backends)
            return found
        found = {}
        for name, note in self._around.notes() if self.packed is None else self.packed.notes():
            found.setdefault(name, []).append(note)
        return found

    def knows(self, neighbour: Neighbour) -> bool:
        """Return whether a peer has been neither removed nor added again since."""
        if self.packed is not None and self.packed.knows(neighbour):
            return True
        return self.neighbours.get(neighbour.name) is neighbour

    def lost(self, neighbour: Neighbour, why: str) -> None:
        """Let go of a peer that is gone, or withdraws its memory: NIXL tells of it from now on."""
        if not self.knows(neighbour):
            return
        log.warning("transfers with %s go by NIXL from now on: %s", neighbour.name, why)
        (self.packed.leave if self.packed is not None and self.packed.knows(neighbour) else self._shut)(neighbour.name)


def bytes_of(note: Any) -> bytes:
    """Return a notification as bytes; raise TypeError if it is neither a text nor bytes, as NIXL does."""
    return note.encode() if isinstance(note, str) else bytes(memoryview(note))


def packed_peers(name: str, real: Any, options: PackedOptions) -> PackedPeers | None:
    """Return the end of an agent's packed transfers; None if it has none."""
    if options.when == NEVER or isinstance(real, StandaloneAgent):
        return None
    try:
        return PackedPeers(name, real, options)
    except KVPlanError as error:
        log.info("no transfer is packed: %s", error)
        return None


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, KVPlanError) else f"{type(error).__name__}: {error}"
