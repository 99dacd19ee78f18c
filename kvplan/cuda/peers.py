"""The links between the visible GPUs: which GPU reaches which, by NVLink or PCIe, and why another pair does not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from ctypes import POINTER, Structure, byref, c_char, c_int, c_uint, c_void_p
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvplan.cuda.driver import SUCCESS, Driver, driver
from kvplan.cuda.machine import bus_id
from kvplan.cuda.nvml import handle_of, nvml
from kvplan.cuda.peer_access import refusal
from kvplan.errors import TransferError

MAX_NVLINKS = 18  # NVML_NVLINK_MAX_LINKS
_ACTIVE = 1
_TO_SWITCH = 2  # NVML_NVLINK_DEVICE_TYPE_SWITCH
_READ, _NVLINK = 0, 2  # NVML_P2P_CAPS_INDEX
_OK = 0  # NVML_P2P_STATUS
_CAUSES = {
    1: "the chipset does not support peer access",
    2: "one of the GPUs does not support peer access",
    3: "the PCIe topology does not support peer access",
    4: "a setting of the driver disables peer access",
}


class PciInfo(Structure):
    """nvmlPciInfo_t: the place of a device on the PCI bus."""

    _fields_ = (
        ("legacy_id", c_char * 16),
        ("domain", c_uint),
        ("bus", c_uint),
        ("device", c_uint),
        ("device_id", c_uint),
        ("subsystem_id", c_uint),
        ("bus_id", c_char * 32),
    )


_NVML: dict[str, tuple[Any, ...]] = {
    "nvmlDeviceGetP2PStatus": (c_void_p, c_void_p, c_int, POINTER(c_int)),
    "nvmlDeviceGetNvLinkState": (c_void_p, c_uint, POINTER(c_int)),
    "nvmlDeviceGetNvLinkRemoteDeviceType": (c_void_p, c_uint, POINTER(c_int)),
    "nvmlDeviceGetNvLinkRemotePciInfo_v2": (c_void_p, c_uint, POINTER(PciInfo)),
}


@dataclass(frozen=True, slots=True)
class PeerLink:
    """The link from a GPU to a peer: another GPU, whose memory the GPU reads and writes.

    Attributes:
        gpu: ordinal of the GPU.
        peer: ordinal of the peer.
        reachable: whether the driver lets the GPU reach the peer's memory.
        why: the reason if it does not, else "".
        nvlinks: number of active NVLink links between the two, 0 if there are none; None if NVML does not tell.
    """

    gpu: int
    peer: int
    reachable: bool
    why: str = ""
    nvlinks: int | None = None

    @property
    def key(self) -> str:
        """Return the kind of the link, by which measurements of pairs are kept.

        >>> [PeerLink(0, 1, True, nvlinks=nvlinks).key for nvlinks in (18, 0, None)]
        ['nvlink18', 'pcie', 'link']
        """
        if self.nvlinks is None:
            return "link"
        return f"nvlink{self.nvlinks}" if self.nvlinks else "pcie"

    @property
    def words(self) -> str:
        """Return the kind of the link in words.

        >>> [PeerLink(0, 1, True, nvlinks=nvlinks).words for nvlinks in (18, 1, 0, None)]
        ['NVLink, 18 links', 'NVLink, 1 link', 'PCIe', 'a link that NVML does not tell']
        """
        if self.nvlinks is None:
            return "a link that NVML does not tell"
        return f"NVLink, {self.nvlinks} link{'s' * (self.nvlinks != 1)}" if self.nvlinks else "PCIe"

    @property
    def refused(self) -> str:
        """Return the pair with the reason why the GPU does not reach the peer's memory, or "" if it does.

        >>> PeerLink(0, 1, False, why="MIG").refused, PeerLink(0, 1, True).refused
        ('cuda:0 cannot reach the memory of cuda:1: MIG', '')
        """
        return "" if self.reachable else f"cuda:{self.gpu} cannot reach the memory of cuda:{self.peer}: {self.why}"


def link_between(gpu: int, peer: int) -> PeerLink:
    """Return the link from a GPU to a peer. No context is opened, and nothing is set.

    Args:
        gpu: ordinal of the GPU that reads and writes.
        peer: ordinal of the GPU whose memory it is. If there is no such GPU, the link is not reachable.

    Raises:
        TransferError: there is no driver, or both are the same GPU.

    >>> try:
    ...     words = link_between(0, 1).words
    ... except TransferError:  # no driver here
    ...     words = ""
    """
    if gpu == peer:
        raise TransferError(f"a link joins two GPUs, and cuda:{gpu} is given twice")
    return _links(driver(), [(gpu, peer)])[0]


def links() -> tuple[PeerLink, ...]:
    """Return the links of all ordered pairs of visible GPUs; () if one is visible. No context is opened.

    Raises:
        TransferError: there is no driver, or it does not tell how many GPUs there are.

    >>> try:
    ...     pairs = [(link.gpu, link.peer) for link in links()]
    ... except TransferError:  # no driver here
    ...     pairs = []
    """
    cu = driver()
    visible = range(cu.devices())
    pairs = [(gpu, peer) for gpu in visible for peer in visible if gpu != peer]
    return _links(cu, pairs) if pairs else ()


Place = tuple[int, int, int]  # domain, bus and device on the PCI bus


class _Ends(NamedTuple):
    """The ends of the NVLink links at one GPU.

    Attributes:
        handle: NVML's handle of the GPU.
        place: place of the GPU.
        switched: number of active links to a switch.
        direct: number of active links by the place of the device at their other end.
    """

    handle: c_void_p
    place: Place
    switched: int
    direct: Mapping[Place, int]


def _links(cu: Driver, pairs: Iterable[tuple[int, int]]) -> tuple[PeerLink, ...]:
    pairs = tuple(pairs)
    with nvml(_NVML) as library:
        ends = {ordinal: _ends(cu, library, ordinal) for ordinal in {one for pair in pairs for one in pair}}
        return tuple(_link(cu, library, pair, ends[pair[0]], ends[pair[1]]) for pair in pairs)


def _link(cu: Driver, library: Any, pair: tuple[int, int], one: _Ends | None, other: _Ends | None) -> PeerLink:
    try:
        why = refusal(cu, *pair)
    except TransferError as error:
        return PeerLink(*pair, reachable=False, why=str(error))
    if one is None or other is None:
        return PeerLink(*pair, reachable=not why, why=why)
    if why:
        why = _CAUSES.get(_status(library, one, other, _READ) or _OK, why)
    return PeerLink(*pair, reachable=not why, why=why, nvlinks=_nvlinks(library, one, other))


def _nvlinks(library: Any, one: _Ends, other: _Ends) -> int | None:
    joined = _status(library, one, other, _NVLINK)
    if joined is None:
        return None
    if joined != _OK:
        return 0
    # Through a switch, all links of a GPU lead to every peer, and the end with fewer links bounds the rate.
    return min(one.switched, other.switched) + one.direct.get(other.place, 0) or None


def _status(library: Any, one: _Ends, other: _Ends, capability: int) -> int | None:
    status = c_int()
    code = library.nvmlDeviceGetP2PStatus(one.handle, other.handle, capability, byref(status))
    return status.value if code == SUCCESS else None


def _ends(cu: Driver, library: Any, ordinal: int) -> _Ends | None:
    """Return the ends of a GPU's links, or None if NVML does not know the GPU."""
    if library is None:
        return None
    try:
        pci = bus_id(cu, cu.handle(ordinal))
    except TransferError:
        return None
    place, handle = _place(pci), handle_of(library, pci)
    if place is None or handle is None:
        return None
    switched, direct = 0, Counter[Place]()
    for number in range(MAX_NVLINKS):
        state, kind, info = c_int(), c_int(), PciInfo()
        if library.nvmlDeviceGetNvLinkState(handle, number, byref(state)) != SUCCESS or state.value != _ACTIVE:
            continue
        code = library.nvmlDeviceGetNvLinkRemoteDeviceType(handle, number, byref(kind))
        if code == SUCCESS and kind.value == _TO_SWITCH:
            switched += 1
        elif library.nvmlDeviceGetNvLinkRemotePciInfo_v2(handle, number, byref(info)) == SUCCESS:
            direct[info.domain, info.bus, info.device] += 1
    return _Ends(handle, place, switched, direct)


def _place(pci: str) -> Place | None:
    """Return the numbers of a bus id.

    >>> _place("0000:0f:00.0"), _place("")
    ((0, 15, 0), None)
    """
    found = re.fullmatch(r"([0-9a-f]+):([0-9a-f]+):([0-9a-f]+)\.[0-7]", pci, re.ASCII)
    if found is None:
        return None
    domain, bus, device = (int(part, 16) for part in found.groups())
    return domain, bus, device
