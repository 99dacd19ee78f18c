"""Memory of a GPU that other processes may open, as the driver itself has it."""

from __future__ import annotations

import ctypes

import pytest
import torch

import kvplan
from kvplan.cuda.device import Device
from kvplan.cuda.ipc.exports import exported

pytestmark = pytest.mark.gpu

MIB = 1 << 20


class Location(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("ordinal", ctypes.c_int))


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("place", Location), ("flags", ctypes.c_int))


class Properties(ctypes.Structure):
    """CUmemAllocationProp, with nothing asked but pinned memory of a GPU."""

    _fields_ = (("kind", ctypes.c_int), ("handles", ctypes.c_int), ("place", Location), ("window", ctypes.c_void_p),
                ("flags", ctypes.c_ubyte * 8))  # fmt: skip


@pytest.mark.parametrize("handles", [0, 1])
def test_memory_of_cumemcreate_says_whether_it_opens(handles):
    """What vLLM's sleep mode allocates."""
    device = Device(0)
    cu, library = device.driver, ctypes.CDLL("libcuda.so.1")
    handle, address = ctypes.c_uint64(), ctypes.c_uint64()
    properties = Properties(1, handles, Location(1, 0))
    with device.current():
        torch.zeros(1, device="cuda:0")
        assert library.cuMemCreate(
            ctypes.byref(handle), ctypes.c_size_t(4 * MIB), ctypes.byref(properties), ctypes.c_uint64(0)
        ) == 0  # fmt: skip
        assert cu.cuMemAddressReserve(ctypes.byref(address), 4 * MIB, 0, 0, 0) == 0
        assert cu.cuMemMap(address.value, 4 * MIB, 0, handle.value, 0) == 0
        access = Access(Location(1, 0), 3)  # to read and write; without it the driver names no range
        assert cu.cuMemSetAccess(address.value, 4 * MIB, ctypes.byref(access), 1) == 0
    try:
        if handles:
            assert exported(device, address.value + 64, MIB).pieces == (4 * MIB,)
        else:
            with pytest.raises(kvplan.PathError, match=r"asked for no file descriptors; .*expandable_segments:False"):
                exported(device, address.value + 64, MIB)
    finally:
        with device.current():
            cu.cuMemUnmap(address.value, 4 * MIB)
            cu.cuMemAddressFree(address.value, 4 * MIB)
            cu.cuMemRelease(handle.value)
