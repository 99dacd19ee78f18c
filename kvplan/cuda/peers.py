"""The links between the visible GPUs: which GPU reaches which, by NVLink or PCIe, and why another pair does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvplan.cuda.driver import Driver, driver
from kvplan.cuda.machine import bus_id, nvml
from kvplan.errors import PathError, TransferError

MAX_NVLINKS = 36  # NVML_NVLINK_MAX_LINKS
_ACTIVE = 1  # NVML_FEATURE_ENABLED
_SWITCH = 2  # NVML_NVLINK_DEVICE_TYPE_SWITCH
_READ, _NVLINK = 0, 2  # NVML_P2P_CAPS_INDEX
_OK = 0  # NVML_P2P_STATUS
_CAUSES = {
    1: "the chipset does not support peer access",
    2: "one of the GPUs does not support peer access",
    3: "the PCIe topology does not support peer access",
    4: "a setting of the driver disables peer access",
}

Ask = Callable[..., Any]  # calls a function of NVML


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


def refusal(cu: Driver, gpu: int, peer: int) -> str:
    """Return why the driver does not let a GPU reach a peer's memory, or "" if it does. No context is opened.

    Raises:
        TransferError: there is no such GPU, or a call failed.
    """
    can = cu.get("cuDeviceCanAccessPeer", cu.handle(gpu), cu.handle(peer))
    return "" if can else "the driver allows no peer access between them"


def check_reach(cu: Driver, gpu: int, peer: int) -> None:
    """Check that a GPU can reach the memory of a peer, or its own. No context is opened.

    Raises:
        PathError: the driver allows no access; the message says what the usual causes are.
        TransferError: there is no such GPU, or a call failed.
    """
    why = refusal(cu, gpu, peer) if gpu != peer else ""
    if why:
        raise PathError(
            f"cuda:{gpu} cannot reach the memory of cuda:{peer}: {why}. Usual causes are MIG, a virtual machine, and "
            "GPUs or PCIe bridges without peer access: see `kvplan doctor` and `nvidia-smi topo -p2p r`"
        )


class _Ports(NamedTuple):
    """The active NVLink links of a GPU.

    Attributes:
        handle: NVML's handle of the GPU.
        place: domain, bus and device of the GPU.
        switched: number of links to a switch.
        direct: number of links by the place of the device at their other end.
    """

    handle: Any
    place: tuple[int, int, int]
    switched: int
    direct: Counter[tuple[int, int, int]]


def _links(cu: Driver, pairs: Sequence[tuple[int, int]]) -> tuple[PeerLink, ...]:
    with nvml() as ask:
        ports = {ordinal: _ports(cu, ask, ordinal) for ordinal in {ordinal for pair in pairs for ordinal in pair}}
        return tuple(_link(cu, ask, pair, ports[pair[0]], ports[pair[1]]) for pair in pairs)


def _link(cu: Driver, ask: Ask, pair: tuple[int, int], mine: _Ports | None, theirs: _Ports | None) -> PeerLink:
    try:
        why = refusal(cu, *pair)
    except TransferError as error:
        return PeerLink(*pair, reachable=False, why=str(error))
    if mine is None or theirs is None:
        return PeerLink(*pair, reachable=not why, why=why)
    if why:
        why = _CAUSES.get(ask("nvmlDeviceGetP2PStatus", mine.handle, theirs.handle, _READ), why)
    nvlinks: int | None = None
    joined = ask("nvmlDeviceGetP2PStatus", mine.handle, theirs.handle, _NVLINK)
    if joined == _OK:
        # Through a switch, all links of a GPU lead to every peer, and the end with fewer links bounds the rate.
        nvlinks = min(mine.switched, theirs.switched) + mine.direct[theirs.place] or None
    elif joined is not None:
        nvlinks = 0
    return PeerLink(*pair, reachable=not why, why=why, nvlinks=nvlinks)


def _ports(cu: Driver, ask: Ask, ordinal: int) -> _Ports | None:
    """Return a GPU's active links, or None if NVML does not know the GPU."""
    try:
        gpu = ask("nvmlDeviceGetHandleByPciBusId", bus_id(cu, ordinal))
    except TransferError:
        return None
    place = ask("nvmlDeviceGetPciInfo", gpu)
    if place is None:
        return None
    switched, direct = 0, Counter[tuple[int, int, int]]()
    for number in range(MAX_NVLINKS):
        if ask("nvmlDeviceGetNvLinkState", gpu, number) != _ACTIVE:
            continue
        if ask("nvmlDeviceGetNvLinkRemoteDeviceType", gpu, number) == _SWITCH:
            switched += 1
        elif (end := ask("nvmlDeviceGetNvLinkRemotePciInfo", gpu, number)) is not None:
            direct[end.domain, end.bus, end.device] += 1
    return _Ports(gpu, (place.domain, place.bus, place.device), switched, direct)
