"""The transports by name, and why this machine cannot use one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec

from kvplan.agents.relocation import regions_of
from kvplan.agents.way import Offer, Served, Way
from kvplan.base.quoting import listed, quoted
from kvplan.errors import KVPlanError, PathError, TransferError
from kvplan.layout.components import Region
from kvplan.layout.kvlayout import KVLayout

# Transports between processes of one machine, with the class of each.
LOCAL = {
    "cuda_ipc": ("kvplan.agents.cuda_ipc.cuda_ipc_way", "CudaIpcWay"),
    "shm": ("kvplan.agents.shm_way", "ShmWay"),
}
NIXL = "nixl"
TRANSPORTS = (*LOCAL, NIXL)


def checked_transports(transports: object) -> tuple[str, ...]:
    """Return names of transports, each once; raise PathError if one is unknown.

    >>> checked_transports(["shm", "nixl"])
    ('shm', 'nixl')
    """
    if isinstance(transports, str) or not isinstance(transports, Sequence) or not transports:
        raise PathError(f"transports is {quoted(transports)}; give some of {listed(TRANSPORTS)}, the best first")
    for name in transports:
        if name not in TRANSPORTS:
            raise PathError(f"unknown transport {quoted(name)}; expected one of {listed(TRANSPORTS)}")
    return tuple(dict.fromkeys(transports))


def ways_here(transports: Sequence[str], device: str | None = None) -> tuple[dict[str, Way], dict[str, str]]:
    """Return the local transports that this machine can use, and the reasons why it cannot use the others.

    Args:
        transports: names of transports.
        device: device of the agent's executor, if the user gave one.

    >>> ways, reasons = ways_here(["shm"])
    >>> list(ways), reasons
    (['shm'], {})
    """
    found: dict[str, Way] = {}
    reasons: dict[str, str] = {}
    for name in transports:
        if name == NIXL:
            if find_spec("nixl") is None:
                reasons[name] = "NIXL is not installed: pip install nixl"
            continue
        module, cls = LOCAL[name]
        try:
            make = getattr(import_module(module), cls)
            found[name] = make(device) if name == "cuda_ipc" and device not in (None, "cpu") else make()
        except (ImportError, KVPlanError) as error:
            reasons[name] = str(error)
    return found, reasons


class OfferedLayouts:
    """What an agent offers at one time, by transport.

    Args:
        ways: the transports.
        layouts: layouts by name.
        number: tells it from those before; cards say it, and visitors say it again.

    Attributes:
        number: as given.
        offers: the offers.
        layouts: names of the layouts that each offer holds.
        refused: why a transport does not offer all layouts.
        regions: the memory that is offered.
        users: number of offers that visitors hold.
    """

    def __init__(self, ways: Mapping[str, Way], layouts: Mapping[str, KVLayout], number: int = 0) -> None:
        self.number = number
        self.offers: dict[str, Offer] = {}
        self.layouts: dict[str, tuple[str, ...]] = {}
        self.refused: dict[str, str] = {}
        self.users = 0
        try:
            for way in ways.values():
                self._add(way, layouts)
        except BaseException:
            self.close()
            raise
        self.regions = regions_of(layouts[name] for names in self.layouts.values() for name in names)

    def _add(self, way: Way, layouts: Mapping[str, KVLayout]) -> None:
        """Offer the layouts that a transport takes."""
        taken: dict[str, KVLayout] = {}
        for name, layout in layouts.items():
            reasons = (way.refuse(region) for region in regions_of([layout]))
            reason = next((reason for reason in reasons if reason is not None), None)
            if reason is None:
                taken[name] = layout
            else:
                self.refused.setdefault(way.name, f"layout {quoted(name)}: {reason}")
        if not taken:
            return
        try:
            self.offers[way.name] = way.offer(regions_of(taken.values()))
        except PathError as error:
            self.refused[way.name] = str(error)
        else:
            self.layouts[way.name] = tuple(taken)

    def close(self) -> None:
        """Give back all offers."""
        while self.offers:
            self.offers.popitem()[1].close()


class Offers:
    """What an agent offers now, and what it offered before, as long as visitors use that.

    Args:
        ways: the transports.
        layouts: layouts by name.

    Attributes:
        now: what is offered now.
    """

    def __init__(self, ways: Mapping[str, Way], layouts: Mapping[str, KVLayout]) -> None:
        self._ways = ways
        self._lock = threading.Lock()
        self.now = OfferedLayouts(ways, layouts)
        self._before: list[OfferedLayouts] = []

    def renew(self, layouts: Mapping[str, KVLayout]) -> None:
        """Offer other layouts from now on. Cards of earlier ones are refused, and visitors keep what they have."""
        with self._lock:
            made = OfferedLayouts(self._ways, layouts, self.now.number + 1)
            self._before.append(self.now)
            self.now = made
        self._tidy()

    def of(self, transport: str) -> list[Offer]:
        """Return the offers of a transport, with earlier ones that visitors use."""
        return [one.offers[transport] for one in (*self._before, self.now) if transport in one.offers]

    def outdated(self) -> list[OfferedLayouts]:
        """Return earlier offers that visitors use and whose memory is not all offered any more."""

        def offered(region: Region) -> bool:
            return any(
                one.address <= region.address and region.end <= one.end and one.device == region.device
                for one in self.now.regions
            )

        return [one for one in self._before if not all(map(offered, one.regions))]

    def serve(self, transport: str, number: int) -> Served:
        """Serve a visitor, whose card is of the offer of a number; see :meth:`kvplan.agents.way.Offer.serve`."""
        with self._lock:
            now = self.now
            if number != now.number or transport not in now.offers:
                raise TransferError("other memory is offered by now; ask for a new card")
            now.users += 1
        try:
            return _Held(now.offers[transport].serve(), now, self._let_go)
        except BaseException:
            self._let_go(now)
            raise

    def _let_go(self, offered: OfferedLayouts) -> None:
        with self._lock:
            offered.users -= 1
        self._tidy()

    def _tidy(self) -> None:
        with self._lock:
            over = [one for one in self._before if not one.users]
            self._before = [one for one in self._before if one.users]
        for one in over:
            one.close()

    def close(self) -> None:
        """Give back all offers."""
        for one in [*self._before, self.now]:
            one.close()


class _Held:
    """The state for a visitor, which holds an offer until it is closed; see :class:`kvplan.agents.way.Served`."""

    def __init__(self, served: Served, offered: OfferedLayouts, let_go: Callable[[OfferedLayouts], None]) -> None:
        self.descriptors, self.heard, self.notes = served.descriptors, served.heard, served.notes
        self.offered, self._served, self._let_go = offered, served, let_go

    def close(self) -> None:
        self._served.close()
        self._let_go(self.offered)
