"""The memory of an agent, and its peers: those whose memory is open here, and those whose transfers are packed."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import Any

from kvplan.engines.nixl.descriptor_rows import Rows, rows_of
from kvplan.engines.nixl.neighbours import Neighbourhood, card_of
from kvplan.engines.nixl.packed_options import NEVER, PackedOptions
from kvplan.engines.nixl.packed_peers import PackedPeers
from kvplan.engines.nixl.spans import Registered, Spans
from kvplan.engines.nixl.transfer_handles import Neighbour
from kvplan.errors import KVPlanError
from kvplan.plan.row_plans import RowProgram

UNPACKED = PackedOptions(NEVER)
log = logging.getLogger("kvplan.engines.nixl")


class AgentPeers:
    """The registered memory and the peers of an agent.

    Args:
        real: NIXL's agent.
        options: when transfers are packed.

    Attributes:
        real: as given.
        packed: peers whose transfers are packed; None if no transfer is.
        neighbours: by name, peers whose memory is open here.
    """

    def __init__(self, real: Any, options: PackedOptions = UNPACKED) -> None:
        self.real = real
        self.neighbours: dict[str, Neighbour] = {}
        self._cards: dict[str, bytes | None] = {}
        self._registered = Registered()
        name = str(getattr(real, "name", ""))
        self._around = Neighbourhood(name)
        self.packed = _packed_peers(name, real, options)
        self._lock = threading.RLock()
        self._programs: dict[tuple[int, int], RowProgram] = {}
        self._removals: Counter[str] = Counter()

    # Memory.

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
                waits.append(self.packed.withdraw(self.local().layouts))
        for wait in waits:
            wait()

    def card(self) -> bytes | None:
        """Return the card that offers the registered memory; None if there is nothing to offer."""
        with self._lock:
            try:
                packed = 0 if self.packed is None else self.packed.serve(self.local().layouts)
                return self._around.card(self._registered.union(), self._registered.version, packed)
            except Exception as error:  # noqa: BLE001  # NIXL's metadata is enough
                log.warning("kvplan offers no memory to peers, NIXL moves all transfers: %s", told(error))
                return None

    # Peers.

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
                log.info("transfers with %s go by NIXL: %s", name, told(error))
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
                log.warning("the memory of %s is still open: %s", name, told(error))

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

    def candidates(self, name: str) -> list[Neighbour]:
        """Return the peers of a name that may hold a list's rows, in the order in which they are asked."""
        packed = {} if self.packed is None else self.packed.peers
        return [peers[name] for peers in (self.neighbours, packed) if name in peers]

    def local(self) -> Spans:
        """Return the memory that is registered now."""
        return self._around.spans(self._registered.union(), self._registered.version)

    def notify(self, peer: str, note: bytes, backend: Any = None) -> None:
        """Send a notification by NIXL."""
        self.real.send_notif(peer, note, backend)

    def notes(self, backends: list[str]) -> dict[str, list[bytes]]:
        """Return new notifications, by the names of peers."""
        if self.packed is None:
            found: dict[str, list[bytes]] = self.real.get_new_notifs(backends)
            return found
        found = {}
        for name, note in self.packed.notes():
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


def _packed_peers(name: str, real: Any, options: PackedOptions) -> PackedPeers | None:
    """Return the end of an agent's packed transfers; None if it has none."""
    if options.when == NEVER:
        return None
    try:
        return PackedPeers(name, real, options)
    except KVPlanError as error:
        log.info("no transfer is packed: %s", error)
        return None


def told(error: Exception) -> str:
    """Return an error as the log shows it."""
    return str(error) if isinstance(error, KVPlanError) else f"{type(error).__name__}: {error}"
