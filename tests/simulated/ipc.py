"""GPU memory and words of several processes, played within one process.

An owner's handle holds an address. To open it gives the same address, so both sides see the same bytes. The entry
points count what is opened, so that a test sees what was left.
"""

# ruff: noqa: N802  # the driver's names

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING, Any

from kvplan.cuda.device import SUCCESS
from kvplan.cuda.driver import IpcHandle
from tests.simulated.pieces import PieceEntries

if TYPE_CHECKING:
    from tests.simulated.device import Device

INVALID, INVALID_CONTEXT = 1, 201
UUID = bytes(range(15))


def handle_of(number: int, kind: bytes) -> IpcHandle:
    return IpcHandle.from_buffer_copy(struct.pack("<4sQ52x", kind, number))


def number_in(handle: IpcHandle, kind: bytes) -> int | None:
    found, number = struct.unpack("<4sQ52x", bytes(handle))
    return number if found == kind else None


class IpcEntries(PieceEntries):
    """The driver's entry points of memory, events and words that processes share.

    Attributes:
        mapped: how often each address was opened and not closed.
        registered: addresses of pinned pages.
        visible: how many GPUs this process sees.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        first = min(device.peers.values(), key=lambda one: one.ordinal)
        machine = self if first is device else first.driver
        self.visible = 1 + max(device.peers)
        self.mapped: dict[int, int] = {} if machine is self else machine.mapped
        self.registered: set[int] = set() if machine is self else machine.registered
        if machine is not self:
            self.pieces, self.handles = machine.pieces, machine.handles
            self.spans, self.held = machine.spans, machine.held

    # GPUs.

    def devices(self) -> int:
        return self.visible

    def handle(self, ordinal: int) -> int:
        return ordinal

    def cuDeviceGetUuid_v2(self, out: Any, handle: int) -> int:
        out._obj.raw = UUID + bytes([handle])
        return SUCCESS

    def cuDeviceCanAccessPeer(self, out: Any, gpu: int, peer: int) -> int:
        out._obj.value = int(peer not in self._device.peers[gpu].unreachable)
        return SUCCESS

    # Memory.

    def cuMemGetAddressRange_v2(self, start: Any, nbytes: Any, address: int) -> int:
        pieces = [(first, first + held, 0) for first, held, _ in self.pieces]
        for first, last, _ in pieces + self._device.owned:
            if first <= address < last:
                start._obj.value, nbytes._obj.value = first, last - first
                return self._device.fault("cuMemGetAddressRange")
        return INVALID

    def cuIpcGetMemHandle(self, out: Any, address: int) -> int:
        self._fill(out, handle_of(address, b"mem "))
        return self._device.fault("cuIpcGetMemHandle")

    def cuIpcOpenMemHandle_v2(self, out: Any, handle: IpcHandle, flags: int) -> int:
        assert flags == 1
        code, address = self._device.fault("cuIpcOpenMemHandle"), number_in(handle, b"mem ")
        owner = next((ordinal for first, _, ordinal in self._device.owned if first == address), None)
        if code or address is None or owner is None:
            return code or INVALID
        self._device.enabled.append(owner)
        self.mapped[address] = self.mapped.get(address, 0) + 1
        out._obj.value = address
        return SUCCESS

    def cuIpcCloseMemHandle(self, address: int) -> int:
        return self._less(self.mapped, address)

    # Words.

    def cuMemHostRegister_v2(self, address: int, nbytes: int, flags: int) -> int:
        code = self._device.fault("cuMemHostRegister")
        if not code:
            self.registered.add(address)
            self._device.pinned.append((address, address + nbytes))
        return code

    def cuMemHostUnregister(self, address: int) -> int:
        self.registered.remove(address)
        self._device.pinned[:] = [one for one in self._device.pinned if one[0] != address]
        return SUCCESS

    def cuStreamWriteValue64_v2(self, stream: int, address: int, value: int, flags: int) -> int:
        code = self._device.fault("cuStreamWriteValue64")
        if not code:
            assert any(first <= address < last for first, last in self._device.pinned)
            self._device.write_word(stream, address, value)
        return code

    def cuStreamWaitValue64_v2(self, stream: int, address: int, value: int, flags: int) -> int:
        code = self._device.fault("cuStreamWaitValue64")
        if not code:
            assert flags == 0
            assert any(first <= address < last for first, last in self._device.pinned)
            with self._device.lock:
                self._device.streams[stream].append(lambda: ctypes.c_uint64.from_address(address).value >= value)
        return code

    @staticmethod
    def _less(counts: dict[int, int], key: int) -> int:
        counts[key] -= 1
        if not counts[key]:
            del counts[key]
        return SUCCESS

    @staticmethod
    def _fill(out: Any, handle: IpcHandle) -> None:
        out._obj.reserved[:] = handle.reserved[:]
