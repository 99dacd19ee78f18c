"""The state of an agent that outlives it: its service thread, visitors, links, executors and sums."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

from kvplan.agents.by_nixl.nixl_end import NixlEnd
from kvplan.agents.by_nixl.nixl_link import NixlLink
from kvplan.agents.by_nixl.nixl_packed import NixlPacked, PackedWay
from kvplan.agents.identity import this_process
from kvplan.agents.link import Link
from kvplan.agents.loop import Loop, Watcher, guarded
from kvplan.agents.offers import Offers
from kvplan.agents.packed.programs import NOTHING, Offer
from kvplan.agents.peer_transfer import Lines
from kvplan.agents.visitors import Visitor, Visitors
from kvplan.base.process import AGENTS, at_exit, generation
from kvplan.base.threads import Latch
from kvplan.errors import TransferError
from kvplan.execute.executor import Executor
from kvplan.execute.stats import Tally
from kvplan.plan.plan import Plan

EXIT_SECONDS = 5.0  # the longest time that an exit waits for transfers in flight and notes that are not sent
LONG_EXIT_SECONDS = 30.0  # the same for packed transfers that move
WITHDRAW_SECONDS = 5e-4  # between two looks whether visitors have parted
LOOK_SECONDS = 5e-3  # between two looks for the ends of packed transfers

log = logging.getLogger("kvplan.agents")


class Core(Watcher):
    """The state of an agent. Its threads refer to this object, and not to the agent, which can be garbage-collected.

    Args:
        name: name of the agent.
        offered: what it offers.
        users: users whose processes may visit.
        executor: the user's executor, or None.
        nixl: its end of NIXL, or None.
        packed: how it takes packed transfers by NIXL, or None if it takes none.

    Attributes:
        carded: whether a card was made, so that peers may name its layouts.
        packed: its packed way, or None.
        agent: identity of the agent.
        key: key of its card.
        loop: the service thread.
        visitors: the owner's side.
        peers: those that it has met, by name.
        links: its connections to owners.
        lines: its transfers with peers.
        tally: sums over its transfers.
        closing: whether it accepts no more peers and transfers.
        ended: set when all peers have gone and all is given back.
    """

    def __init__(
        self,
        name: str,
        offered: Offers,
        users: frozenset[int],
        executor: Executor | None,
        nixl: NixlEnd | None,
        packed: PackedWay | None = None,
    ) -> None:
        self.name, self.offered, self.nixl = name, offered, nixl
        self.agent, self.key = secrets.token_bytes(16), secrets.token_bytes(32)
        self.tally = Tally()
        self.peers: dict[str, Any] = {}
        self.links: dict[int, Link] = {}
        self.nixl_links: dict[int, NixlLink] = {}
        self.carded = False
        self.packed: NixlPacked | None = None
        self.closing = self._collected = False
        self.ended = Latch()
        self._made_in = generation()
        self._given = executor
        self._own: dict[str, Executor] = {}
        self._lock = threading.RLock()
        self.loop = Loop()
        self.lines = Lines(self.loop.wake)
        self.loop.add(self.lines)
        try:
            self.visitors = Visitors(name, self.agent, self.key, offered, users | {this_process().uid}, self.loop)
        except BaseException:
            self.loop.stop()
            raise
        if nixl is not None and packed is not None:
            offer = Offer(nixl.layouts.values())  # it is made once, so peers' memory is looked up once
            self.packed = NixlPacked(
                name, nixl, lambda: offer if self.carded else NOTHING, self.executor_on, packed,
                tally=self.tally,
            )  # fmt: skip
        at_exit(AGENTS, _drain_at_exit)
        _cores.add(self)

    @property
    def foreign(self) -> bool:
        """Whether this process is a forked child, and the agent is its parent's."""
        return self._made_in != generation()

    def check_open(self) -> None:
        """Raise TransferError if the agent is closed, or belongs to the parent process of a fork."""
        if self._made_in != generation():
            raise TransferError("agents do not survive a fork, and this one is the parent's; make one in the child")
        if self.closing:
            raise TransferError(f"the agent {self.name!r} is closed")

    def executor_for(self, plan: Plan) -> Executor:
        """Return the executor for a plan: the user's if it serves the device, and otherwise one of the agent's own."""
        device, given = _device(plan), self._given
        if given is not None and "cpu" not in (given.device, device):
            return given
        return self.executor_on(device)

    def executor_on(self, device: str) -> Executor:
        """Return the executor of a device: the user's if it is of this device, and otherwise one of the agent's own."""
        given, own = self._given, self._own
        if given is not None and given.device == device:
            return given
        executor = own.get(device)
        if executor is None:
            with self._lock:
                executor = own.get(device)
                if executor is None:
                    executor = own[device] = Executor(device)
        return executor

    def in_flight(self) -> int:
        """Count the transfers that have not ended."""
        links: list[Link | NixlLink] = [*self.links.values(), *self.nixl_links.values()]
        return sum(link.in_flight for link in links) + (0 if self.packed is None else self.packed.in_flight)

    def admit(self, link: Link) -> None:
        """Serve a new link; raise TransferError if the agent was closed while it was made."""
        with self._lock:  # a close that has ended sees no link any more
            if not self.ended.happened:
                self.links[id(link)] = link
                self.loop.add(link)
        if self.closing:
            link.leave()
            if self.ended.happened:
                link.serve()
            self.check_open()

    def parted(self, link: Link) -> None:
        """Forget a link that has ended, and the peer that has nothing else."""
        self.links.pop(id(link), None)
        for name, peer in list(self.peers.items()):
            if peer.link is link and peer.nixl is None:
                self.peers.pop(name, None)

    def withdraw(self, timeout: float) -> None:
        """Let visitors part that use memory which is not offered any more, and wait until they have.

        Raises:
            TransferError: some have not parted in time.
        """
        until, asked = time.monotonic() + timeout, set[int]()
        while old := self._holders():
            for visitor in old:
                if id(visitor) not in asked:
                    asked.add(id(visitor))
                    visitor.connection.say_farewell()
            if time.monotonic() > until:
                raise TransferError(f"after {timeout} seconds, peers still use memory of {self.name!r}")
            time.sleep(WITHDRAW_SECONDS)

    def _holders(self) -> list[Visitor]:
        """Return visitors that were given memory which is not all offered any more."""
        now = self.offered.now
        return [one for one in list(self.visitors.here.values()) if not all(map(now.holds, one.offered.regions))]

    def gpus(self) -> set[int]:
        """Return numbers of the GPUs whose memory is offered, or was, as long as visitors use it."""
        every = [self.offered.now, *(one.offered for one in list(self.visitors.here.values()))]
        return {gpu for offered in every for gpu in offered.gpus}

    # ---- its end -----------------------------------------------------------------------------------------------------

    def begin_to_close(self) -> None:
        """Let the service thread close everything, and return at once: a finalizer may call this."""
        if self.foreign:
            return
        self.closing = True
        if self.loop.thread.started:
            self.loop.add(self)
        else:  # no card was made and no peer was met
            self.serve()

    def collect(self) -> None:
        """Close everything, also what :meth:`wait_closed` closes otherwise: the agent was garbage-collected."""
        self._collected = True
        self.begin_to_close()

    def due(self) -> float | None:
        """Return when to look again for the ends of transfers, if there are some."""
        packs = self.packed is not None and (self.packed.begun or not self.visitors.closing)
        return time.monotonic() + LOOK_SECONDS if self.closing and (packs or self.lines.busy) else None

    def serve(self) -> None:
        """Close what can be closed now; the service thread calls this again after each event."""
        if not self.closing or self.ended.happened:
            return
        if not self.visitors.closing:
            if self.packed is not None and self.packed.begun:
                self.packed.poll()  # nobody else does so, if its user did
                return
            self.visitors.begin_to_close()
            for nixl in list(self.nixl_links.values()):
                guarded(nixl.leave)
        for link in list(self.links.values()):
            if not link.leaving:
                link.leave()
        with self._lock:
            if self.links or self.visitors.here or self.lines.busy or self.ended.happened:
                return
            guarded(self.offered.close)
            guarded(self.visitors.order.close)
            self.loop.stop()
            _cores.discard(self)
            self.ended.set()
        if self._collected:
            guarded(lambda: self.wait_closed(EXIT_SECONDS))

    def wait_closed(self, timeout: float) -> None:
        """Wait until all peers have gone, then close executors and threads.

        Raises:
            TransferError: a peer has not gone in time. The service thread goes on waiting for it.
        """
        until = time.monotonic() + timeout
        if not self.ended.wait(timeout):
            names = sorted({visitor.name for visitor in list(self.visitors.here.values())})
            waits = [f"{one!r} still uses its memory" for one in names]
            waits += self._in_flight() or ["peers have not parted"] * (not names)
            raise TransferError(
                f"after {timeout} seconds, the agent {self.name!r} is not closed: {'; '.join(waits)}. Keep the memory "
                "allocated, and call close() again"
            )
        left = max(until - time.monotonic(), 1.0)
        self.loop.thread.join(left)
        if self.packed is not None:
            self.packed.close(max(until - time.monotonic(), 1.0))
        for executor in self._own.values():
            executor.close()
        if self.nixl is not None:
            self.nixl.close()

    def _in_flight(self) -> list[str]:
        """Return what has not ended, in words."""
        busy = [link.waits() for link in list(self.links.values()) if link.in_flight]
        if direct := sum(link.in_flight for link in list(self.nixl_links.values())):
            busy.append(f"{direct} transfers by NIXL have not ended")
        if self.packed is not None and (packed := self.packed.in_flight):
            busy.append(f"{packed} packed transfers have not ended")
        return busy

    def drain(self, begun: float) -> str | None:
        """Wait until no transfer is in flight and all notes are sent; return what is lost, in words.

        Args:
            begun: when the exit began, as ``time.monotonic`` counts.
        """
        while True:
            if self.packed is not None and self.packed.in_flight:
                self.packed.poll()  # nobody else does so, if its user does
            busy = self._in_flight()
            if not busy:
                return None
            moves = self.packed is not None and self.packed.begun
            if time.monotonic() >= begun + (LONG_EXIT_SECONDS if moves else EXIT_SECONDS):
                return "; ".join(busy)
            time.sleep(1e-3)

    def end_threads(self) -> None:
        """End the threads that call NIXL: the end of the interpreter would come within such a call, and abort."""
        if self.packed is not None:
            self.packed.stop(EXIT_SECONDS)
        if self.nixl is not None:
            self.lines.stop()

    def drop(self) -> None:
        """Close all descriptors of connections in a forked child. The parent's connections stay as they are."""
        self.closing = True
        self.loop.drop()
        self.visitors.drop()
        for link in self.links.values():
            link.drop()


def _device(plan: Plan) -> str:
    devices: Iterable[Any] = (layout.device for pair in plan.layouts for layout in reversed(pair))
    return next((str(device) for device in devices if device != "cpu"), "cpu")


_cores: weakref.WeakSet[Core] = weakref.WeakSet()


def _drain_at_exit() -> None:
    begun = time.monotonic()
    lost = [core.drain(begun) for core in list(_cores)]
    for core in list(_cores):
        core.visitors.listener.remove()
        core.end_threads()
    if any(lost):
        message = f"at exit, agents gave up after {time.monotonic() - begun:.0f} s: {'; '.join(filter(None, lost))}"
        warnings.warn(message, RuntimeWarning, stacklevel=1)


def _forked() -> None:
    for core in list(_cores):
        core.drop()
    _cores.clear()


os.register_at_fork(after_in_child=_forked)
