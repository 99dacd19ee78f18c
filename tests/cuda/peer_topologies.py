"""Machines with several GPUs, as their driver and their NVML describe them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

from kvplan.cuda.peers import PeerLink
from tests.cuda.fake_system import Nvml
from tests.simulated.entries import Entries

GPU, SWITCH = 0, 2  # the kinds of NVLink's other end
FIRST = 0x10  # bus of the first GPU


@dataclass(frozen=True)
class Topology:
    """GPUs, and what joins them.

    Attributes:
        count: number of GPUs; the bus of GPU n is FIRST + n.
        ports: of each GPU, its active NVLink links: the GPU at the other end, or "switch".
        refused: ordered pairs that the driver refuses, with NVML's status of reading.
    """

    count: int
    ports: Mapping[int, Sequence[int | str]] = field(default_factory=dict)
    refused: Mapping[tuple[int, int], int] = field(default_factory=dict)

    def joined(self, gpu: int, peer: int) -> bool:
        ports = self.ports.get(gpu, ())
        return peer in ports or ("switch" in ports and "switch" in self.ports.get(peer, ()))

    def play(self, entries: Entries, nvml: Nvml) -> None:
        """Let a driver and an NVML answer as this machine's."""
        entries.gives |= {
            "cuDeviceGetCount": [self.count],
            "cuDeviceGet": lambda _, ordinal: [ordinal],
            "cuDeviceGetPCIBusId": lambda _, room, gpu: [f"0000:{FIRST + gpu:02X}:00.0".encode()],
            "cuDeviceCanAccessPeer": lambda _, gpu, peer: [int((gpu, peer) not in self.refused)],
        }
        nvml.gives |= {
            "nvmlDeviceGetP2PStatus": self._status,
            "nvmlDeviceGetNvLinkState": lambda gpu, link: int(link < len(self._ports(gpu))),
            "nvmlDeviceGetNvLinkRemoteDeviceType": lambda gpu, link: (
                SWITCH if self._ports(gpu)[link] == "switch" else GPU
            ),
            "nvmlDeviceGetNvLinkRemotePciInfo": lambda gpu, link: SimpleNamespace(
                domain=0, bus=FIRST + int(self._ports(gpu)[link]), device=0
            ),
        }

    def _ports(self, bus: int) -> Sequence[int | str]:
        return self.ports.get(bus - FIRST, ())

    def _status(self, bus: int, other: int, capability: int) -> int:
        pair = (bus - FIRST, other - FIRST)
        return self.refused.get(pair, 0) if capability == 0 else 5 * (not self.joined(*pair))


def all_pairs(count: int, link: Callable[[int, int], PeerLink]) -> tuple[PeerLink, ...]:
    """The links of all ordered pairs of GPUs."""
    return tuple(link(gpu, peer) for gpu in range(count) for peer in range(count) if gpu != peer)


def reached(gpu: int, peer: int, nvlinks: int | None) -> PeerLink:
    return PeerLink(gpu, peer, reachable=True, nvlinks=nvlinks)


def refused(gpu: int, peer: int, why: str, nvlinks: int | None) -> PeerLink:
    return PeerLink(gpu, peer, reachable=False, why=why, nvlinks=nvlinks)


def linked(nvlinks: int | None) -> Callable[[int, int], PeerLink]:
    return lambda gpu, peer: reached(gpu, peer, nvlinks)
