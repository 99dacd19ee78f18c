"""A process that owns memory of a GPU, seen by the test that started it; and its memory, opened here."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_size_t, c_uint64
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvplan import KVLayout
from kvplan.cuda.device import Device
from kvplan.cuda.driver import SUCCESS
from kvplan.cuda.ipc.exports import Export
from kvplan.cuda.ipc.openings import Opening
from kvplan.errors import TransferError
from tests.commands import ROOT

PATIENCE = 120.0  # seconds
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


class Tensor:
    """What kvplan reads of a tensor, at an address of another process's memory."""

    def __init__(self, address: int, shape: tuple[int, ...], device: str) -> None:
        self.address, self.shape, self.device = address, shape, device
        self.dtype = "uint8"

    def data_ptr(self) -> int:
        return self.address

    def stride(self) -> tuple[int, ...]:
        strides = [1]
        for size in reversed(self.shape[1:]):
            strides.insert(0, strides[0] * size)
        return tuple(strides)

    def element_size(self) -> int:
        return 1


class Visited:
    """The owner's process."""

    def __init__(self, channel: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self.channel, self.process = channel, process

    def ask(self, name: str, *arguments: Any, send: tuple[int, ...] = ()) -> Any:
        self.tell(name, *arguments, send=send)
        return self.answer()[0]

    def tell(self, name: str, *arguments: Any, send: tuple[int, ...] = ()) -> None:
        socket.send_fds(self.channel, [json.dumps([name, *arguments]).encode()], send)

    def answer(self) -> tuple[Any, list[int]]:
        message, received, _, _ = socket.recv_fds(self.channel, 1 << 20, 128)
        assert message, f"the owner has ended: {self.process.wait(PATIENCE)}"
        return json.loads(message), list(received)

    @contextmanager
    def open(self, ordinal: int) -> Iterator[tuple[int, Opening]]:
        """The address of the owner's tensor here, mapped for a GPU; and what maps it."""
        told = self.ask("export")
        assert "error" not in told, told["error"]
        export = Export(told["gpu"], told["address"], told["nbytes"], bytes.fromhex(told["handle"]), (*told["pieces"],))
        held: list[int] = []
        if export.pieces:
            self.tell("pieces")
            held = self.answer()[1]
        try:
            self.opening = opening = Opening(Device(ordinal), export, held)
        finally:
            for each in held:
                os.close(each)
        try:
            yield opening.address + told["tensor"] - told["address"], opening
        finally:
            opening.close()

    def layout(self, notation: str, address: int, shape: tuple[int, ...], owner: int) -> KVLayout:
        layout = KVLayout.from_tensors(notation, Tensor(address, shape, f"cuda:{owner}"))
        regions = tuple(replace(region, owner=self.opening) for region in layout.regions)
        return KVLayout(layout.built._replace(regions=regions))


@contextmanager
def owner(ordinal: int, nbytes: int, **environment: str) -> Iterator[Visited]:
    """Start an owner; afterwards it has ended."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine.settimeout(PATIENCE)
    command = [sys.executable, "-m", "tests.gpu.processes.owner", str(theirs.fileno()), str(ordinal), str(nbytes)]
    with theirs:
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, pass_fds=[theirs.fileno()])
    try:
        with mine:
            yield Visited(mine, process)
        process.wait(PATIENCE)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(PATIENCE)


def refused(visited: Visited, ordinal: int) -> str:
    """The error of opening an owner's memory."""
    try:
        with visited.open(ordinal):
            pass
    except (TransferError, ValueError) as error:
        return str(error)
    raise AssertionError("it was opened")


def is_mapped(device: Device, address: int) -> bool:
    """Whether the driver knows an address as memory that the GPU may access."""
    start, nbytes, cu = c_uint64(), c_size_t(), device.driver
    with device.current():
        return bool(cu.cuMemGetAddressRange_v2(byref(start), byref(nbytes), address) == SUCCESS)


def shared_pages() -> int:
    """Number of mapped pages that this process shares with others by kvplan."""
    return sum("/memfd:kvplan" in row for row in Path("/proc/self/maps").read_text().splitlines())
