"""The transports by name, and why this machine cannot use one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec

from kvplan.agents.relocation import regions_of
from kvplan.agents.way import Offer, Way
from kvplan.base.quoting import listed, quoted
from kvplan.errors import KVPlanError, PathError
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
    """The offers of an agent, by transport.

    Attributes:
        offers: the offers.
        layouts: names of the layouts that each offer holds.
        refused: why a transport does not offer all layouts.
    """

    def __init__(self) -> None:
        self.offers: dict[str, Offer] = {}
        self.layouts: dict[str, tuple[str, ...]] = {}
        self.refused: dict[str, str] = {}

    def add(self, way: Way, layouts: Mapping[str, KVLayout]) -> None:
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
