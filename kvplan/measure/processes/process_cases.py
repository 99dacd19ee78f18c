"""The ways to move blocks between two processes, each checked byte by byte before it is timed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from kvplan.layout.kvlayout import KVLayout
from kvplan.measure import baselines
from kvplan.measure.baselines import Baseline
from kvplan.measure.flights import Begin, Line
from kvplan.measure.processes.pool_layouts import name_of
from kvplan.measure.workload import TO_CACHE, Work
from kvplan.plan.copy_program import compile  # noqa: A004
from kvplan.plan.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor

    from kvplan.agents.peer import Peer
    from kvplan.execute.executor import Executor

TWO, ONE = "two processes", "one process"
NIXL = {"pull": "NIXL READ", "push": "NIXL WRITE"}


class Remote:
    """The other process's pool, and a copy of it here, with the same bytes.

    Args:
        peer: the other process.
        mirror: the copy, as flat bytes.
        line: a GPU and its stream, which copy between both; None on the CPU.
    """

    def __init__(self, peer: Peer, mirror: Tensor, line: Line | None) -> None:
        self.peer = peer
        self._mirror, self._line = mirror, line
        regions = [region for layout in peer.layouts.values() for region in layout.regions]
        self._address = min(region.address for region in regions)

    def write(self) -> None:
        """Copy the mirror to the other process."""
        self._copy(self._address, self._mirror.data_ptr())

    def read(self) -> None:
        """Copy the other process's bytes to the mirror."""
        self._copy(self._mirror.data_ptr(), self._address)

    def _copy(self, dst: int, src: int) -> None:
        nbytes, line = self._mirror.numel(), self._line
        if line is None:
            ctypes.memmove(dst, src, nbytes)
            return
        import torch

        torch.cuda.synchronize(self._mirror.device)
        with line.device.current():
            line.device.copy(dst, src, nbytes, line.handle)
        line.stream.synchronize()

    def plan(self, moved: Work, layouts: Mapping[str, KVLayout], cache: KVLayout | None = None) -> Plan:
        """Plan the same blocks, with a pool of the other process in the place of the mirror."""
        pool, pulls = layouts[name_of(moved.geometry)], moved.geometry.direction in TO_CACHE
        near = cache or (moved.dst if pulls else moved.src).layout
        src, dst = (pool, near) if pulls else (near, pool)
        return compile(src, dst).plan(moved.src_ids, moved.dst_ids)

    def checked(self, name: str, moved: Work, begin: Begin) -> Baseline:
        """Return a way that moves blocks from or to the other process, with the comparison of every byte."""

        def move() -> None:
            self.write()
            begin().synchronize()
            if moved.geometry.direction not in TO_CACHE:
                self.read()

        return Baseline(begin, lambda: moved.verify(name, move))


def two_processes(remote: Remote, moved: Work) -> Baseline:
    """Make the way of this package: a transfer with the peer."""
    begin = partial(remote.peer.submit, remote.plan(moved, remote.peer.layouts))
    return remote.checked(TWO, moved, begin)


def one_process(executor: Executor, moved: Work) -> Baseline:
    """Make the same transfer within this process."""
    return baselines.verified(ONE, moved, partial(executor.submit, moved.plan))


def by_nixl(peer: Peer, cache: KVLayout, remote: Remote, moved: Work) -> Baseline:
    """Make the baseline of NIXL, which reads if it pulls and writes if it pushes.

    Args:
        peer: the other process, met by NIXL.
        cache: the layout of this process, which its agent of NIXL has registered.
        remote: the same pool, met by this package; only the comparison of bytes uses it.
        moved: the transfer.
    """
    begin: Callable[[], Any] = partial(peer.submit, remote.plan(moved, peer.layouts, cache), way="direct")
    return remote.checked(NIXL[moved.geometry.direction], moved, begin)
