"""Wires between two processes of one machine, and sizes. Pure, so that they can be looked at without NIXL."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

KIB, MIB = 1 << 10, 1 << 20
# What two new processes measure: packed transfers; a descriptor for each row; packed transfers beside compute.
PACKED, NIXL, NO_THREAD, DECODE = "packed", "NIXL as it comes", "NIXL without its thread", "decode"


class Wire(NamedTuple):
    """A wire of UCX between two processes of one machine.

    Attributes:
        name: name of the wire in the tables.
        memory: ``"host"`` or ``"gpu"``.
        transports: the value of ``UCX_TLS``; "" for UCX's own choice.
        paced: GB/s that the wire is taken to have, or 0 for as fast as it goes.
        mib: MiB of a transfer, at most.
        most_rows: most rows of a transfer.
        most_posted: most rows of a transfer with a descriptor for each row, whose posts take microseconds a row.
    """

    name: str
    memory: str
    transports: str
    paced: float = 0.0
    mib: int = 128
    most_rows: int = 32768
    most_posted: int = 32768


LARGE = 4096, 1 << 24, 4096  # as large as a prefill's cache: vLLM #55434 has 4.9 GB
PACED_GBPS = 50.0  # a network card of 400 Gb/s
WIRES = {
    wire.name: wire
    for wire in (
        Wire("shm", "host", ""),
        Wire("tcp", "host", "tcp"),
        Wire("cuda_ipc", "gpu", "", 0.0, *LARGE),
        Wire("cuda_ipc_50", "gpu", "", PACED_GBPS, *LARGE),
        Wire("cuda_tcp", "gpu", "tcp,cuda_copy", 0.0, 128, 1 << 19, 1024),
    )
}


@dataclass(frozen=True)
class Scale:
    """How large a run is.

    Attributes:
        rows: bytes of a row.
        nbytes: most bytes of a transfer.
        most_rows: most rows of a transfer.
        most_posted: most rows of a transfer with a descriptor for each row.
        layers: rows of a block.
        repeats: samples of each way; medians are taken.
        single: samples of one block, and of a note there and back.
        slots: the agents' rings, as (number of slots, bytes of a slot); None for their own choice.
        rounds, seconds: of transfers beside compute.
    """

    rows: tuple[int, ...] = (256, 576, 8 * KIB, 64 * KIB)
    nbytes: int = 128 * MIB
    most_rows: int = 32768
    layers: int = 16
    repeats: int = 7
    single: int = 101
    slots: tuple[int, int] | None = None
    most_posted: int = 32768
    rounds: int = 3
    seconds: float = 0.5

    def on(self, wire: Wire, mib: int | None = None) -> Scale:
        """Return the scale of one wire, with transfers of its own size, or of so many MiB.

        >>> FULL.on(WIRES["cuda_ipc"]).nbytes >> 20, FULL.on(WIRES["cuda_ipc"], 64).nbytes >> 20
        (4096, 64)
        """
        nbytes = (mib or wire.mib) * MIB
        return replace(self, nbytes=nbytes, most_rows=wire.most_rows, most_posted=wire.most_posted)

    def blocks(self, row: int) -> int:
        """Return the blocks of a transfer with rows of so many bytes.

        >>> Scale().blocks(576), Scale().blocks(64 << 10)
        (2048, 128)
        """
        return max(min(self.most_rows, self.nbytes // row) // self.layers, 2)


FULL = Scale()
SMOKE = Scale(
    rows=(576, 8 * KIB), nbytes=512 * KIB, most_rows=256, layers=4, repeats=2, single=3, most_posted=64, rounds=1,
    seconds=0.1,
)  # fmt: skip
