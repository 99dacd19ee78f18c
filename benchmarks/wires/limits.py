"""Sizes of the benchmarks of wires, and their limits. Pure, so that they can be looked at without NIXL."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvplan.cli.arguments import positive

KIB, MIB = 1 << 10, 1 << 20


class Wire(NamedTuple):
    """A wire of UCX between two processes of one machine.

    Attributes:
        name: name of the wire in the tables.
        memory: ``"host"`` or ``"gpu"``.
        transports: the value of ``UCX_TLS``; "" for UCX's own choice.
        paced: GB/s that the wire is taken to have, or 0 for as fast as it goes.
        of_one_message: least share of one large message, by bytes of a row.
        of_descriptors: least factor over the best way with a descriptor for each row, by bytes of a row.
        mib: MiB of a transfer, at most.
        most_rows: most rows of a transfer.
        most_posted: most rows of a transfer with a descriptor for each row, whose posts take microseconds a row.
    """

    name: str
    memory: str
    transports: str
    paced: float = 0.0
    of_one_message: dict[int, float] = {}  # noqa: RUF012  # never changed
    of_descriptors: dict[int, float] = {}  # noqa: RUF012
    mib: int = 128
    most_rows: int = 32768
    most_posted: int = 32768


GPU_DESCRIPTORS = {576: 50.0, 8 * KIB: 20.0, 64 * KIB: 5.0}
GPU_FAST = {256: 0.5, 576: 0.6, 8 * KIB: 0.7, 64 * KIB: 0.7}
GPU_SLOW = {256: 0.85, 576: 0.9, 8 * KIB: 0.95, 64 * KIB: 0.95}
# As large as a prefill's cache: vLLM #55434 has 4.9 GB.
LARGE = {"mib": 4096, "most_rows": 1 << 24, "most_posted": 4096}
PACED_GBPS = 50.0  # a network card of 400 Gb/s
WIRES = {
    "shm": Wire("shm", "host", "", of_descriptors={576: 10.0, 8 * KIB: 2.0}),
    "tcp": Wire("tcp", "host", "tcp", of_descriptors={576: 8.0, 8 * KIB: 2.0}),
    "cuda_ipc": Wire("cuda_ipc", "gpu", "", 0.0, GPU_FAST, GPU_DESCRIPTORS, **LARGE),
    "cuda_ipc_50": Wire("cuda_ipc_50", "gpu", "", PACED_GBPS, GPU_SLOW, **LARGE),
    "cuda_tcp": Wire("cuda_tcp", "gpu", "tcp,cuda_copy", 0.0, GPU_SLOW, GPU_DESCRIPTORS, 128, 1 << 19, 1024),
}
BYTES_A_MESSAGE = 8 * MIB  # one message for each, and one more for a pair of ranks
CPU_MS = 2.0  # per GB, on either side, where GPUs gather and scatter
LATENCIES, LATENCY_MORE_US = 2, 50.0  # of one block
SLOWER_BESIDE_DECODE = 1.03  # compute on either side
BESIDE = ("decode",)  # compute beside transfers


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


def add_slots(parser: ArgumentParser) -> None:
    """Add the argument of the agents' rings."""
    parser.add_argument(
        "--slots", type=positive, nargs=2, metavar=("NUMBER", "MIB"), help="slots of a ring, and their size"
    )


def slots_of(chosen: Namespace) -> tuple[int, int] | None:
    """Return the rings that the user has chosen, in bytes.

    >>> slots_of(Namespace(slots=[16, 32]))
    (16, 33554432)
    """
    return chosen.slots and (chosen.slots[0], chosen.slots[1] * MIB)
