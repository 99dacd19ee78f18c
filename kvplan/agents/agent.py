"""Agents: this process's end of transfers with other processes."""

from __future__ import annotations

import logging
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from kvplan.agents.by_nixl.nixl_end import NixlEnd
from kvplan.agents.by_nixl.nixl_link import NixlLink, NixlPacked
from kvplan.agents.card import AgentCard, Choice, Offered, check_name, choose, read_card, write_card
from kvplan.agents.connection import Link, Loop, greet
from kvplan.agents.local_memory import NIXL, TRANSPORTS, Offers, checked_transports, close_all, transports_here
from kvplan.agents.packed.line import NOTHING, Offer
from kvplan.agents.packed.ring import checked_slots
from kvplan.agents.peer import Peer
from kvplan.agents.peer_transfer import Lines
from kvplan.agents.sockets import allowed_users, this_process
from kvplan.agents.visitors import Visitors
from kvplan.base.process import AGENTS, at_exit, generation
from kvplan.base.threads import error_of
from kvplan.base.values import quoted
from kvplan.errors import KVPlanError, LayoutError, PathError, TransferError
from kvplan.execute.executor import Executor
from kvplan.execute.stats import ExecutorStats, Tally
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.plan import Plan

CLOSE_SECONDS = 30.0
MEET_SECONDS = 10.0
EXIT_SECONDS = 5.0  # the longest time that an exit waits for transfers in flight and notes that are not sent
LONG_EXIT_SECONDS = 30.0  # the same for packed transfers that move
LOOK_SECONDS = 5e-4  # between two looks whether peers have parted

log = logging.getLogger("kvplan.agents")


class Agent:
    """This process's end of transfers with other processes: the layouts that it offers, and the peers that it has met.

    Args:
        name: name of this process; every peer has another name.
        layouts: layouts by the names that peers will see. Their memory must stay allocated until :meth:`close` returns.
            Host memory must be shared: a pinned pool of :func:`kvplan.allocate`, one with ``shared=``, or a torch
            tensor after ``share_memory_()``. A process that only visits others may give none.
        transports: the transports that it may use, the best first: ``"cuda_ipc"`` between GPUs of one machine,
            ``"shm"`` between host pools of one machine, ``"nixl"`` between machines.
        executor: the executor that moves the bytes. By default the agent makes one for each device.
        users: names or numbers of other users whose processes may meet this one, and whose cards are accepted.
        agent: an existing ``nixl_agent`` of the same name, for the transport ``nixl``.
        backends: names of the NIXL backends that it may use.
        progress: how packed transfers move on: ``"thread"``, by a thread of the agent, which is the default; or
            ``"step"``, by calls of :meth:`poll`. With ``agent=`` of the caller's, it packs only if this is given, and
            reads all notes of that agent.
        slots: number and bytes of the slots of the ring of packed transfers; None for a ring that fits its device. The
            ring is allocated with the first packed transfer.

    Raises:
        LayoutError: the memory of a layout is not this process's.
        PathError: a transport is unknown.
        KVPlanError: a name or a user is wrong.
        TransferError: the system has no socket for it.

    Two processes exchange the bytes of :meth:`card` over any channel. After :meth:`meet`, a process reads and writes
    the other's layouts; the other process makes no call for it. Several threads may call the methods. A card gives
    access to this memory, so send it only to processes that may have it. A forked child must make its own agent.

    >>> import kvplan, numpy as np
    >>> like = kvplan.KVLayout.from_tensors("block dim", np.arange(32, dtype=np.int8).reshape(4, 8))
    >>> pool = kvplan.allocate("block dim", like=like, shared=True)
    >>> with Agent("pool", {"kv": pool}) as owner, Agent("worker", {}) as worker:
    ...     peer = worker.meet(owner.card())
    ...     transfer = peer.submit(kvplan.compile(like, peer.layouts["kv"]).plan([1], [3]), note=b"stored")
    ...     transfer.synchronize()
    ...     peer.transport, owner.notes(), pool.tensors[3].tolist()
    ('shm', [('worker', b'stored')], [8, 9, 10, 11, 12, 13, 14, 15])
    """

    def __init__(
        self, name: str, layouts: Mapping[str, KVLayout], *, transports: Sequence[str] = TRANSPORTS,
        executor: Executor | None = None, users: Iterable[str | int] = (), agent: Any = None,
        backends: Sequence[str] = ("UCX",), progress: str | None = None, slots: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        self.name, self.layouts, self.peers = check_name(name), _checked_layouts(layouts), dict[str, Peer]()
        self._transports = checked_transports(transports)
        if executor is not None and not isinstance(executor, Executor):
            raise PathError(f"executor is {quoted(executor)}; give a kvplan.Executor, or None")
        self._users = allowed_users(users) | {this_process().uid}
        self._usable, self._reasons = transports_here(self._transports, None if executor is None else executor.device)
        ring, threaded = checked_slots(slots), progress != "step"
        if progress not in ("thread", "step", None):
            raise KVPlanError(f"progress is {quoted(progress)}; expected 'thread', 'step' or None")
        self._given, self._own = executor, dict[str, Executor]()
        self._naming = threading.RLock()  # held while a name goes to a peer, and never while one waits
        self._id, self._key, self._made_in = secrets.token_hex(16), secrets.token_hex(32), generation()
        self._links: dict[int, Link | NixlLink] = {}
        self.tally, self._carded, self._closing = Tally(), False, False
        self._nixl: NixlEnd | None = None
        self._packed: NixlPacked | None = None
        if NIXL in self._transports and (agent is not None or NIXL not in self._reasons):
            self._reasons.pop(NIXL, None)
            self._nixl = NixlEnd(name, self.layouts, agent, backends, progress_thread=not threaded)
            if agent is None or progress is not None:
                offer = Offer(self.layouts.values())  # it is made once, so peers' memory is looked up once
                offered = lambda: offer if self._carded else NOTHING  # noqa: E731
                self._packed = NixlPacked(
                    name, self._nixl, offered, self.executor_on, ring, threaded=threaded, tally=self.tally
                )
        self._loop, offers = Loop(), Offers(self._usable, self.layouts)
        self.lines = Lines(self._loop.wake)
        self._loop.add(self.lines)
        try:
            self._visitors = Visitors(name, self._key, offers, self._users, self._loop)
        except BaseException:
            offers.close()
            self._loop.stop()
            raise
        at_exit(AGENTS, _drain_at_exit)
        _agents.add(self)

    def card(self) -> bytes:
        """Return the data that a peer needs to :meth:`meet` this process: its layouts, and what each transport offers.

        Raises:
            TransferError: the agent is closed.
        """
        self.check_open()
        self._loop.start()
        self._carded = True
        now = self._visitors.offers
        offered = {name: Offered(offer.layouts, offer.part) for name, offer in now.offers.items()}
        refused = self._reasons | now.refused
        if self._nixl is not None and self.layouts:
            try:
                part: dict[str, Any] = {"metadata": self._nixl.metadata().hex()}
                if self._packed is not None and (version := self._packed.serve_peers()):
                    part["packed"] = version
                offered[NIXL] = Offered(tuple(self.layouts), part)
            except KVPlanError as error:
                refused[NIXL] = str(error)
        me, listener = this_process(), self._visitors.listener
        return write_card(
            AgentCard(
                self.name, me.host, me.pid, self._id, self._key, listener.name, listener.folder, self.layouts,
                now.number, offered, refused,
            )
        )  # fmt: skip

    def offer(self, layouts: Mapping[str, KVLayout]) -> dict[str, str]:
        """Offer other layouts to visitors by the local transports, in place of those so far: the next card has them.

        Layouts that no local transport takes are left out of :attr:`layouts`. Visitors keep the memory that they have
        opened, also in flight, until :meth:`withdraw`; cards of before are refused to others.

        Args:
            layouts: layouts by the names that peers will see.

        Returns:
            By transport, why it does not take all of them.

        Raises:
            LayoutError: the memory of a layout is not this process's.
            PathError: the agent has the transport ``nixl``.
            TransferError: the agent is closed.

        >>> import kvplan, numpy as np
        >>> like = kvplan.KVLayout.from_tensors("block dim", np.zeros((4, 8), np.int8))
        >>> pool = kvplan.allocate("block dim", like=like, shared=True)
        >>> with Agent("pool", {}, transports=("shm",)) as owner:
        ...     list(owner.offer({"kv": pool, "private": like})), list(owner.layouts)
        ...     owner.offer({})
        ...     owner.withdraw(timeout=1.0)
        (['shm'], ['kv'])
        {}
        """
        given = _checked_layouts(layouts)
        self.check_open()
        if self._nixl is not None:
            raise PathError(
                f"the agent {self.name!r} offers its memory by NIXL, too, and that for good; leave out 'nixl'"
            )
        visitors = self._visitors
        with visitors.offering:
            before, visitors.offers = visitors.offers, Offers(self._usable, given, visitors.offers.number + 1)
            before.close()
        self.layouts = {name: layout for name, layout in given.items() if name in visitors.offers.names}
        return self._reasons | visitors.offers.refused

    def withdraw(self, *, timeout: float = CLOSE_SECONDS) -> None:
        """Let peers part that have opened memory which :meth:`offer` has left out, and wait until none uses it.

        They part once their transfers in flight have ended, and meet this process again by a new card.

        Args:
            timeout: seconds to wait for them.

        Raises:
            TransferError: a peer still uses the memory.
        """
        self.check_open()
        visitors, asked = self._visitors, set[int]()

        def parted() -> bool:
            now, gone = visitors.offers, True
            for visitor in list(visitors.here.values()):
                if not all(map(now.holds, visitor.gave.regions)):
                    gone = False
                    if id(visitor) not in asked:
                        asked.add(id(visitor))
                        visitor.say_farewell()
            return gone

        if not _await(parted, timeout):
            raise TransferError(f"after {timeout} seconds, peers still use memory of {self.name!r}")

    def meet(self, card: bytes, *, timeout: float = MEET_SECONDS) -> Peer:
        """Meet a peer by its card, by the first transport of this agent that both can use.

        A new card of a known peer replaces that peer: it takes no more transfers, and those in flight go on; over NIXL
        they fail.

        Args:
            card: what the peer's :meth:`card` returned.
            timeout: seconds to wait for its answer.

        Raises:
            LayoutError: the card cannot be read, one of its layouts is invalid, or it offers what its memory is not.
            PathError: no transport serves a layout; the message has the reason of each. Or the card is of another user.
            KVPlanError: the card is this process's own, or another peer that lives has the name.
            TransferError: the peer is gone, does not answer in time, or refuses.
        """
        self.check_open()
        read, until = read_card(card), time.monotonic() + timeout
        if read.agent == self._id or read.name == self.name:
            raise KVPlanError(f"the card is of {read.name!r}, as this agent; give a peer's card, and each its own name")
        choice = choose(read, self._transports, self._usable, self._reasons)
        self._loop.start()
        link, nixl = self._connect(read, choice, until), None
        try:
            layouts = {
                name: (transport, read.layouts[name] if link is None or transport == NIXL
                       else link.opened[transport].relocated(read.layouts[name]))
                for name, transport in choice.names.items()
            }  # fmt: skip
            with self._naming:
                known = self.peers.get(read.name)
                if known is not None and known.link is not None and known.link.agent != read.agent and not known.gone:
                    raise KVPlanError(
                        f"another agent has the name {read.name!r}, and it lives; give each agent its own name, or "
                        "forget() it"
                    )
                if NIXL in choice.names.values() and self._nixl is not None:
                    if known is not None and known.nixl is not None:
                        self._part(known)  # NIXL knows peers by name
                    part, parted = read.offered[NIXL].part, self._parted
                    nixl = NixlLink(self._nixl, read.name, part, self._packed, self._loop, parted)
                    self._links[id(nixl)] = nixl
                peer = self.peers[read.name] = Peer(read.name, self, link, nixl, layouts)
        except BaseException:
            if link is not None:
                link.leave()
            raise
        if known is not None:
            self._part(known)
        log.info("met %s by %s", read.name, peer.transport, extra={"kvplan_peer": read.name})
        return peer

    def _connect(self, card: AgentCard, choice: Choice, until: float) -> Link | None:
        """Greet the owner, and open what it hands over."""
        if not choice.wanted and (choice.names or not choice.here):
            return None
        greeted = greet(card, self.name, choice.wanted, self._users, until)
        try:
            link = Link(card, greeted, self._loop, self._parted)
            self._links[id(link)] = link
            try:
                link.open(self._usable, choice, greeted)
                self.check_open()
            except BaseException:
                link.leave()
                raise
            finally:
                self._loop.add(link)
        finally:
            close_all(greeted.descriptors)
        return link

    def _parted(self, link: Link | NixlLink) -> None:
        """Forget a link that has ended, and the peer that has nothing else."""
        self._links.pop(id(link), None)
        for name, peer in list(self.peers.items()):
            if peer.link is link and peer.nixl is None:
                self.peers.pop(name, None)

    def forget(self, peer: Peer, *, timeout: float = CLOSE_SECONDS) -> None:
        """Part from a peer: submitted transfers end, or fail over NIXL; then its memory is unmapped.

        A second call for a peer does nothing, and neither does the call of a forked child. Plain executors must have
        ended their transfers over its layouts.

        Args:
            peer: what :meth:`meet` returned.
            timeout: seconds to wait for transfers in flight.

        Raises:
            KVPlanError: ``peer`` is not a peer of this agent.
            TransferError: transfers have not ended; they go on, and the rest follows their end.
        """
        if not isinstance(peer, Peer) or peer.agent is not self:
            raise KVPlanError(f"peer is {peer!r}; give what meet() of {self.name!r} returned")
        if self._foreign:
            return
        with self._naming:
            if self.peers.get(peer.name) is peer:
                self.peers.pop(peer.name, None)
        self._part(peer)
        if peer.link is not None and not peer.link.ended.wait(timeout):
            raise TransferError(f"after {timeout:.3g} seconds, {peer.link.waits()}")

    def _part(self, peer: Peer) -> None:
        for link in (peer.nixl, peer.link):
            if link is not None:
                link.leave()

    def notes(self) -> list[tuple[str, bytes]]:
        """Return the notes that peers sent since the last call, as (peer, note); each comes once.

        Raises:
            TransferError: the agent is closed.
        """
        self.check_open()
        nixl = self._packed or self._nixl
        notes = [] if nixl is None else nixl.notes()
        return notes + self._visitors.notes()  # last: they are taken, and NIXL may raise an error

    def poll(self) -> bool:
        """Move packed transfers on, as far as they can move now; return whether anything moved.

        An engine calls it in each of its steps, if the agent was made with ``progress="step"``. It never blocks.

        Raises:
            TransferError: the agent is closed.
        """
        self.check_open()
        return self._packed is not None and self._packed.poll()

    def publish(self, stream: Any) -> None:
        """Let transfers that visitors submit from now on wait for all work that was issued on a stream so far.

        Call it after the work that writes blocks, then tell the visitor by any channel that it may submit. The
        visitor's GPU waits, and no CPU.

        Args:
            stream: a stream of torch, or an object with ``cuda_stream`` or ``__cuda_stream__``, of a GPU whose memory
                this agent offers.

        Raises:
            PathError: the agent offers no memory of a GPU.
            KVPlanError: it is no stream, or is of another GPU.
            TransferError: the agent is closed.
        """
        self._visitors.order.publish(stream, self._gpus())

    def wait_for_visitors(self, stream: Any) -> None:
        """Let later work on a stream wait for all transfers that visitors have submitted so far; return at once.

        Call it before work that writes blocks again that visitors have read. A transfer counts once its driver calls
        have been made; one that waits on the CPU for its ``after=`` counts later, and a note tells its end.

        Args:
            stream: a stream, as of :meth:`publish`.

        Raises:
            PathError: the agent offers no memory of a GPU.
            KVPlanError: it is no stream, or is of another GPU.
            TransferError: the agent is closed.
        """
        self._visitors.order.wait_for_visitors(stream, self._gpus())

    def _gpus(self) -> set[int]:
        """Return numbers of the GPUs whose memory is offered, or was, as long as visitors use it."""
        self.check_open()
        now = self._visitors.offers
        gpus = now.gpus.union(*(visitor.gave.gpus for visitor in list(self._visitors.here.values())))
        if not gpus:
            why = (self._reasons | now.refused).get("cuda_ipc") or "it is not among them"
            raise PathError(f"the agent {self.name!r} offers no memory of a GPU by cuda_ipc: {why}")
        return gpus

    def stats(self) -> ExecutorStats:
        """Return the sums of this agent's transfers so far; see :meth:`kvplan.Executor.stats`."""
        flying = sum(link.in_flight for link in list(self._links.values()))
        return replace(self.tally.stats(), in_flight=flying + (self._packed.in_flight if self._packed else 0))

    def close(self, *, timeout: float = CLOSE_SECONDS) -> None:
        """Part from all peers, and wait until none uses this process's memory any more; then it may be freed.

        Peers are told, and part once their transfers in flight have ended. Direct transfers by NIXL fail. The call of a
        forked child does nothing.

        Args:
            timeout: seconds to wait for transfers in flight and for peers.

        Raises:
            TransferError: a peer still uses the memory, or transfers are still in flight; the message names them. Keep
                the memory allocated and call again.
        """
        if self._foreign:
            return
        begun, packed, self._closing = time.monotonic(), self._packed, True
        self.peers.clear()
        if packed is None or packed.waits(lambda: not packed.begun, timeout):
            self._visitors.begin_to_close()
            for link in list(self._links.values()):
                link.leave()

        def over() -> bool:
            return not (self._links or self._visitors.here or self.lines.busy or (packed is not None and packed.begun))

        if not _await(over, begun + timeout - time.monotonic()):
            names = sorted({visitor.name for visitor in list(self._visitors.here.values())})
            waits = [f"{name!r} still uses its memory" for name in names] + self._in_flight()
            raise TransferError(
                f"after {timeout} seconds, the agent {self.name!r} is not closed: {'; '.join(waits)}. Keep the memory "
                "allocated, and call close() again"
            )
        self._visitors.offers.close()
        self._visitors.order.close()
        _agents.discard(self)
        self._loop.stop()
        left = max(begun + timeout - time.monotonic(), 1.0)
        self._loop.thread.join(left)
        if packed is not None:
            packed.close(left)
        for executor in self._own.values():
            executor.close()
        if self._nixl is not None:
            self._nixl.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- for peers ---------------------------------------------------------------------------------------------------

    @property
    def _foreign(self) -> bool:
        """Whether this process is a forked child, and the agent is its parent's."""
        return self._made_in != generation()

    def check_open(self) -> None:
        """Raise TransferError if the agent is closed, or belongs to the parent process of a fork."""
        if self._foreign:
            raise TransferError("agents do not survive a fork, and this one is the parent's; make one in the child")
        if self._closing:
            raise TransferError(f"the agent {self.name!r} is closed")

    def executor_for(self, plan: Plan) -> Executor:
        """Return the executor for a plan: the user's if it serves the device, and otherwise one of the agent's own."""
        devices = [layout.device for pair in plan.layouts for layout in reversed(pair) if layout.device != "cpu"]
        device, given = devices[0] if devices else "cpu", self._given
        if given is not None and "cpu" not in (given.device, device):
            return given
        return self.executor_on(device)

    def executor_on(self, device: str) -> Executor:
        """Return the executor of a device: the user's if it is of this device, and otherwise one of the agent's own."""
        if self._given is not None and self._given.device == device:
            return self._given
        with self._naming:
            if device not in self._own:
                self._own[device] = Executor(device)
            return self._own[device]

    # ---- exits -------------------------------------------------------------------------------------------------------

    def _in_flight(self) -> list[str]:
        """Return what has not ended, in words."""
        busy = [link.waits() for link in list(self._links.values()) if link.in_flight]
        if self._packed is not None and self._packed.in_flight:
            busy.append(f"{self._packed.in_flight} packed transfers have not ended")
        return busy

    def drain(self, begun: float) -> str:
        """Wait until no transfer is in flight and all notes are sent; return what is lost, in words.

        Args:
            begun: when the exit began, as ``time.monotonic`` counts.
        """
        while busy := self._in_flight():
            if self._packed is not None:
                self._packed.poll()  # nobody else does so, if its user does
            moves = self._packed is not None and self._packed.begun
            if time.monotonic() >= begun + (LONG_EXIT_SECONDS if moves else EXIT_SECONDS):
                break
            time.sleep(1e-3)
        return "; ".join(busy)

    def end_threads(self) -> None:
        """End the threads that call NIXL: the end of the interpreter would come within such a call, and abort."""
        self._visitors.listener.remove()
        if self._packed is not None:
            self._packed.stop(EXIT_SECONDS)
        if self._nixl is not None:
            self._loop.stop()
            self._loop.thread.join(EXIT_SECONDS)


class NixlAgent(Agent):
    """A :class:`kvplan.Agent` whose only transport is ``nixl``. It registers its layouts at once.

    Args:
        name, layouts, backends, agent, progress, slots: as of :class:`kvplan.Agent`; host memory need not be shared.

    Raises:
        PathError: NIXL is not installed, has none of these backends, or the memory is neither the CPU's nor CUDA's.
        KVPlanError: ``agent`` has another name.
        LayoutError: the memory of a layout is not this process's.
        TransferError: NIXL cannot register the memory.
    """

    def __init__(
        self, name: str, layouts: Mapping[str, KVLayout], *, backends: Sequence[str] = ("UCX",), agent: Any = None,
        progress: str | None = None, slots: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            name, layouts, transports=(NIXL,), agent=agent, backends=backends, progress=progress, slots=slots
        )
        error = PathError(self._reasons[NIXL]) if self._nixl is None else error_of(self._nixl.open)
        if error is not None:
            self.close()
            raise error


def _await(over: Callable[[], bool], timeout: float) -> bool:
    """Wait until something is over; return whether it is."""
    until = time.monotonic() + timeout
    while not over():
        if time.monotonic() > until:
            return False
        time.sleep(LOOK_SECONDS)
    return True


def _checked_layouts(layouts: Mapping[str, KVLayout]) -> dict[str, KVLayout]:
    if not isinstance(layouts, Mapping):
        raise LayoutError(f"layouts is {quoted(layouts)}; give a table of layouts by name, which may be empty")
    for key, layout in layouts.items():
        check_name(key, "a layout")
        if not isinstance(layout, KVLayout):
            raise LayoutError(f"layout {key!r} is a {type(layout).__name__}; give a KVLayout")
        if layout.addresses != "memory":
            raise LayoutError(f"layout {key!r} is not of this process's memory; it cannot be offered")
    return dict(layouts)


_agents: set[Agent] = set()  # those that are not closed


def _drain_at_exit() -> None:
    begun, agents = time.monotonic(), [agent for agent in list(_agents) if not agent._foreign]
    lost = [why for agent in agents if (why := agent.drain(begun))]
    for agent in agents:
        agent.end_threads()
    if lost:
        message = f"at exit, agents gave up after {time.monotonic() - begun:.0f} s: {'; '.join(lost)}"
        warnings.warn(message, RuntimeWarning, stacklevel=1)
