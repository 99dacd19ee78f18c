"""Agents: this process's end of transfers with other processes."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from kvplan.agents.agent_card import AgentCard, Offered, check_name, read_card, write_card
from kvplan.agents.by_nixl.nixl_end import NixlEnd, NixlOffer
from kvplan.agents.by_nixl.nixl_link import NixlLink
from kvplan.agents.by_nixl.nixl_packed import PackedWay, checked_progress
from kvplan.agents.choosing import Chosen, choose
from kvplan.agents.core import Core
from kvplan.agents.greeting import greet
from kvplan.agents.identity import allowed_users, this_process
from kvplan.agents.link import Link
from kvplan.agents.offers import Offers, checked_transports, transports_here
from kvplan.agents.packed.ring import checked_slots
from kvplan.agents.peer import Peer
from kvplan.agents.relocation import relocated
from kvplan.agents.transport import NIXL, TRANSPORTS, close_all
from kvplan.base.values import quoted
from kvplan.errors import KVPlanError, LayoutError, PathError, TransferError
from kvplan.execute.executor import Executor
from kvplan.execute.stats import ExecutorStats
from kvplan.layout.kvlayout import KVLayout

CLOSE_SECONDS = 30.0
MEET_SECONDS = 10.0

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
        self,
        name: str,
        layouts: Mapping[str, KVLayout],
        *,
        transports: Sequence[str] = TRANSPORTS,
        executor: Executor | None = None,
        users: Iterable[str | int] = (),
        agent: Any = None,
        backends: Sequence[str] = ("UCX",),
        progress: str | None = None,
        slots: tuple[int, int] | None = None,
    ) -> None:
        self.name = check_name(name)
        self.layouts = _checked_layouts(layouts)
        self._naming = threading.RLock()  # held while a name goes to a peer, and never while one waits
        self._transports = checked_transports(transports)
        if executor is not None and not isinstance(executor, Executor):
            raise PathError(f"executor is {quoted(executor)}; give a kvplan.Executor, or None")
        self._users = allowed_users(users)
        self._usable, self._reasons = transports_here(self._transports, None if executor is None else executor.device)
        packs = PackedWay(checked_slots(slots), threaded=checked_progress(progress) != "step")
        nixl = None
        if NIXL in self._transports and (agent is not None or NIXL not in self._reasons):
            self._reasons.pop(NIXL, None)
            nixl = NixlEnd(name, self.layouts, agent, backends, progress_thread=not packs.threaded)
        offered = Offers(self._usable, self.layouts)
        try:
            self._core = Core(
                name, offered, self._users, executor, nixl, None if agent is not None and progress is None else packs
            )
        except BaseException:
            offered.close()
            raise
        self.peers: dict[str, Peer] = self._core.peers
        weakref.finalize(self, self._core.collect).atexit = False

    def card(self) -> bytes:
        """Return the data that a peer needs to :meth:`meet` this process: its layouts, and what each transport offers.

        Raises:
            TransferError: the agent is closed.
        """
        core = self._core
        core.check_open()
        core.loop.start()
        core.carded = True
        now = core.offered.now
        offered = {name: Offered(now.layouts[name], one.part) for name, one in now.offers.items()}
        refused = self._reasons | now.refused
        if core.nixl is not None and self.layouts:
            try:
                metadata = core.nixl.metadata()
                packed = 0 if core.packed is None else core.packed.serve_peers()
                offered[NIXL] = Offered(tuple(self.layouts), NixlOffer(metadata, packed).part())
            except KVPlanError as error:
                refused[NIXL] = str(error)
        me, listener = this_process(), core.visitors.listener
        return write_card(
            AgentCard(
                self.name, me.host, me.pid, core.agent, core.key, listener.name, listener.folder, self.layouts,
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
        core, given = self._core, _checked_layouts(layouts)
        core.check_open()
        if core.nixl is not None:
            raise PathError(
                f"the agent {self.name!r} offers its memory by NIXL, too, and that for good; leave out 'nixl'"
            )
        core.offered.renew(given)
        taken = {name for names in core.offered.now.layouts.values() for name in names}
        self.layouts = {name: layout for name, layout in given.items() if name in taken}
        return self._reasons | core.offered.now.refused

    def withdraw(self, *, timeout: float = CLOSE_SECONDS) -> None:
        """Let peers part that have opened memory which :meth:`offer` has left out, and wait until none uses it.

        They part once their transfers in flight have ended, and meet this process again by a new card.

        Args:
            timeout: seconds to wait for them.

        Raises:
            TransferError: a peer still uses the memory.
        """
        self._core.check_open()
        self._core.withdraw(timeout)

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
        core = self._core
        core.check_open()
        read = read_card(card)
        if read.agent == core.agent or read.name == self.name:
            raise KVPlanError(f"the card is of {read.name!r}, as this agent; give a peer's card, and each its own name")
        chosen = choose(read, self._transports, self._usable, self._reasons)
        until = time.monotonic() + timeout
        core.loop.start()
        self._check_name(read)
        link = self._connect(read, chosen, until)
        nixl = None
        try:
            held = {
                name: (transport, self._opened(read, link, name, transport)) for name, transport in chosen.names.items()
            }
            with self._naming:
                self._check_name(read)
                known = self.peers.get(read.name)
                if chosen.nixl is not None and core.nixl is not None:
                    if known is not None and known.nixl is not None:
                        self._part(known)  # NIXL knows peers by name
                    nixl = NixlLink(core.nixl, read.name, chosen.nixl, core.packed)
                peer = self.peers[read.name] = Peer(read.name, core, link, nixl, held)
        except BaseException:
            for one in (link, nixl):
                if one is not None:
                    one.leave()
            raise
        if nixl is not None:
            core.nixl_links[id(nixl)] = nixl
        if known is not None:
            self._part(known)
        log.info("met %s by %s", read.name, peer.transport, extra={"kvplan_peer": read.name})
        return peer

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
        if not isinstance(peer, Peer) or peer.core is not self._core:
            raise KVPlanError(f"peer is {peer!r}; give what meet() of {self.name!r} returned")
        if self._core.foreign:
            return
        with self._naming:
            if self.peers.get(peer.name) is peer:
                self.peers.pop(peer.name, None)
        self._part(peer)
        if peer.link is not None and not peer.link.ended.wait(timeout):
            raise TransferError(f"after {timeout:.3g} seconds, {peer.link.waits()}")

    def _part(self, peer: Peer) -> None:
        if peer.nixl is not None:
            self._core.nixl_links.pop(id(peer.nixl), None)
            peer.nixl.leave()
        if peer.link is not None:
            peer.link.leave()

    def _check_name(self, card: AgentCard) -> None:
        """Raise KVPlanError if another agent has the name of a card, and is known to live."""
        known = self.peers.get(card.name)
        if known is not None and known.link is not None and known.link.agent != card.agent and known.link.lives():
            raise KVPlanError(
                f"another agent has the name {card.name!r}, and it lives; give each agent its own name, or forget() it"
            )

    def notes(self) -> list[tuple[str, bytes]]:
        """Return the notes that peers sent since the last call, as (peer, note); each comes once.

        Raises:
            TransferError: the agent is closed.
        """
        core = self._core
        core.check_open()
        found: list[tuple[str, bytes]] = []
        if core.packed is not None:
            found += core.packed.notes()
        elif core.nixl is not None:
            found += core.nixl.notes()
        return found + core.visitors.notes()  # last: they are taken, and NIXL may raise an error

    def poll(self) -> bool:
        """Move packed transfers on, as far as they can move now; return whether anything moved.

        An engine calls it in each of its steps, if the agent was made with ``progress="step"``. It never blocks.

        Raises:
            TransferError: the agent is closed.
        """
        core = self._core
        core.check_open()
        return core.packed is not None and core.packed.poll()

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
        self._core.visitors.order.publish(stream, self._gpus())

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
        self._core.visitors.order.wait_for_visitors(stream, self._gpus())

    def _gpus(self) -> set[int]:
        core = self._core
        core.check_open()
        gpus = core.gpus()
        if not gpus:
            why = (self._reasons | core.offered.now.refused).get("cuda_ipc") or "it is not among them"
            raise PathError(f"the agent {self.name!r} offers no memory of a GPU by cuda_ipc: {why}")
        return gpus

    def stats(self) -> ExecutorStats:
        """Return the sums of this agent's transfers so far; see :meth:`kvplan.Executor.stats`."""
        return replace(self._core.tally.stats(), in_flight=self._core.in_flight())

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
        core = self._core
        if core.foreign:
            return
        core.begin_to_close()
        self.peers.clear()
        core.wait_closed(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ---- meeting -----------------------------------------------------------------------------------------------------

    def _connect(self, card: AgentCard, chosen: Chosen, until: float) -> Link | None:
        """Greet the owner, and open what it hands over."""
        if not chosen.wanted and (chosen.names or not chosen.here):
            return None
        core, me = self._core, this_process()
        met = greet(card, self.name, chosen.wanted, self._users | {me.uid}, until)
        owner = chosen.owner._replace(uid=met.uid, same_user=met.uid == me.uid)
        try:
            link = Link(card.name, card.agent, met, core.loop, core.parted)
            try:
                link.open(self._usable, chosen.data, chosen.wanted, met.descriptors[1:], owner)
            except BaseException:
                link.leave()
                raise
            finally:
                core.admit(link)
        finally:
            close_all(met.descriptors)
        return link

    def _opened(self, card: AgentCard, link: Link | None, name: str, transport: str) -> KVLayout:
        layout = card.layouts[name]
        return layout if transport == NIXL or link is None else relocated(layout, link.opened[transport].mapped)


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
