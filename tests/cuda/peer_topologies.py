"""Machines with several GPUs, as their driver and their NVML describe them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvplan.cuda.peers import PeerLink
from tests.simulated.entries import Entries

GPU, SWITCH = 0, 2  # the kinds of NVLink's other end
INVALID = 2


@dataclass(frozen=True)
class Topology:
    """GPUs, and what joins them.

    Attributes:
        count: number of GPUs; the bus of GPU n is 0x10 + n.
        ports: of each GPU, its active NVLink links: the GPU at the other end, or "switch".
        refused: ordered pairs that the driver refuses, with NVML's status of reading.
    """

    count: int
    ports: Mapping[int, Sequence[int | str]] = field(default_factory=dict)
    refused: Mapping[tuple[int, int], int] = field(default_factory=dict)

    def joined(self, gpu: int, peer: int) -> bool:
        ports = self.ports.get(gpu, ())
        return peer in ports or ("switch" in ports and "switch" in self.ports.get(peer, ()))

    def play(self, entries: Entries, nvml: Entries) -> None:
        """Let a driver and an NVML answer as this machine's."""
        entries.gives |= {
            "cuDeviceGetCount": [self.count],
            "cuDeviceGet": lambda _, ordinal: [ordinal],
            "cuDeviceGetPCIBusId": lambda _, room, gpu: [f"0000:{0x10 + gpu:02X}:00.0".encode()],
            "cuDeviceCanAccessPeer": lambda _, gpu, peer: [int((gpu, peer) not in self.refused)],
        }
        nvml.gives |= {
            "nvmlDeviceGetHandleByPciBusId_v2": lambda pci, _: [0xA00 + int(pci.split(b":")[1], 16) - 0x10],
            "nvmlDeviceGetP2PStatus": self._status,
            "nvmlDeviceGetNvLinkState": lambda handle, link, _: [int(link < len(self._ports(handle)))],
            "nvmlDeviceGetNvLinkRemoteDeviceType": lambda handle, link, _: [
                SWITCH if self._ports(handle)[link] == "switch" else GPU
            ],
            "nvmlDeviceGetNvLinkRemotePciInfo_v2": self._other_end,
        }
        nvml.codes["nvmlDeviceGetNvLinkState"] = lambda handle, link, _: INVALID * (not self._ports(handle))

    def _ports(self, handle: int) -> Sequence[int | str]:
        return self.ports.get(handle - 0xA00, ())

    def _status(self, one: int, other: int, capability: int, _: object) -> list[int]:
        pair = (one - 0xA00, other - 0xA00)
        return [self.refused.get(pair, 0) if capability == 0 else 5 * (not self.joined(*pair))]

    def _other_end(self, handle: int, link: int, _: object) -> list[dict[str, int]]:
        return [{"domain": 0, "bus": 0x10 + int(self._ports(handle)[link]), "device": 0}]


def all_pairs(count: int, link: Callable[[int, int], PeerLink]) -> tuple[PeerLink, ...]:
    """The links of all ordered pairs of GPUs."""
    return tuple(link(gpu, peer) for gpu in range(count) for peer in range(count) if gpu != peer)


def reached(gpu: int, peer: int, nvlinks: int | None) -> PeerLink:
    return PeerLink(gpu, peer, reachable=True, nvlinks=nvlinks)


def refused(gpu: int, peer: int, why: str, nvlinks: int | None) -> PeerLink:
    return PeerLink(gpu, peer, reachable=False, why=why, nvlinks=nvlinks)


def linked(nvlinks: int | None) -> Callable[[int, int], PeerLink]:
    return lambda gpu, peer: reached(gpu, peer, nvlinks)
