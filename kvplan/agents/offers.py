"""The memory that an agent offers to visitors of its machine, by transport."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec

from kvplan.agents.relocation import regions_of
from kvplan.agents.transport import LOCAL, NIXL, TRANSPORTS, Offer, Transport, close_all
from kvplan.base.values import listed, quoted
from kvplan.errors import KVPlanError, PathError, TransferError
from kvplan.layout.components import Region
from kvplan.layout.kvlayout import KVLayout


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


def transports_here(names: Sequence[str], device: str | None = None) -> tuple[dict[str, Transport], dict[str, str]]:
    """Return the local transports that this machine can use, and the reasons why it cannot use the others.

    Args:
        names: names of transports.
        device: device of the agent's executor, if the user gave one.

    >>> transports, reasons = transports_here(["shm"])
    >>> list(transports), reasons
    (['shm'], {})
    """
    usable: dict[str, Transport] = {}
    reasons: dict[str, str] = {}
    for name in names:
        if name == NIXL:
            if find_spec("nixl") is None:
                reasons[name] = "NIXL is not installed: pip install nixl"
            continue
        module, cls = LOCAL[name]
        try:
            make = getattr(import_module(module), cls)
            usable[name] = make(device) if name == "cuda_ipc" and device not in (None, "cpu") else make()
        except (ImportError, KVPlanError) as error:
            reasons[name] = str(error)
    return usable, reasons


class Offered:
    """What an agent offers at one time.

    Args:
        transports: the transports.
        layouts: layouts by name.
        number: tells it from what was offered before; cards say it, and visitors say it again.

    Attributes:
        number: as given.
        offers: by transport.
        layouts: names of the layouts that each transport offers.
        refused: why a transport does not offer all layouts.
        regions: the memory that is offered.
    """

    def __init__(self, transports: Mapping[str, Transport], layouts: Mapping[str, KVLayout], number: int = 0) -> None:
        self.number = number
        self.offers: dict[str, Offer] = {}
        self.layouts: dict[str, tuple[str, ...]] = {}
        self.refused: dict[str, str] = {}
        try:
            for transport in transports.values():
                self._add(transport, layouts)
        except BaseException:
            self.close()
            raise
        self.regions = regions_of(layouts[name] for names in self.layouts.values() for name in names)

    def _add(self, transport: Transport, layouts: Mapping[str, KVLayout]) -> None:
        """Offer the layouts that a transport takes."""
        taken: dict[str, KVLayout] = {}
        for name, layout in layouts.items():
            reasons = (transport.refuse(region) for region in regions_of([layout]))
            reason = next((reason for reason in reasons if reason is not None), None)
            if reason is None:
                taken[name] = layout
            else:
                self.refused.setdefault(transport.name, f"layout {quoted(name)}: {reason}")
        if not taken:
            return
        try:
            self.offers[transport.name] = transport.offer(regions_of(taken.values()))
        except PathError as error:
            self.refused[transport.name] = str(error)
        else:
            self.layouts[transport.name] = tuple(taken)

    @property
    def gpus(self) -> set[int]:
        """Numbers of the GPUs that have the memory."""
        return {gpu for offer in self.offers.values() for gpu in offer.gpus}

    def holds(self, region: Region) -> bool:
        """Whether all of a region is offered."""
        return any(
            one.address <= region.address and region.end <= one.end and one.device == region.device
            for one in self.regions
        )

    def close(self) -> None:
        """Close the descriptors. Visitors keep theirs."""
        for offer in self.offers.values():
            close_all(offer.descriptors)


class Offers:
    """What an agent offers now.

    Args:
        transports: the transports.
        layouts: layouts by name.

    Attributes:
        now: what is offered now.
    """

    def __init__(self, transports: Mapping[str, Transport], layouts: Mapping[str, KVLayout]) -> None:
        self._transports = transports
        self._lock = threading.RLock()
        self.now = Offered(transports, layouts)

    def renew(self, layouts: Mapping[str, KVLayout]) -> None:
        """Offer other layouts from now on. Cards of earlier ones are refused, and visitors keep what they have."""
        with self._lock:
            before, self.now = self.now, Offered(self._transports, layouts, self.now.number + 1)
            before.close()

    @contextmanager
    def entered(self, number: int) -> Iterator[Offered]:
        """Enter a ``with`` in which what is offered stays; raise TransferError if it has not this number any more."""
        with self._lock:
            if number != self.now.number:
                raise TransferError("other memory is offered by now; ask for a new card")
            yield self.now

    def close(self) -> None:
        """Offer nothing any more."""
        with self._lock:
            self.now.close()
