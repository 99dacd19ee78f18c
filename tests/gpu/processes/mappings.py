"""Memory of other processes that this process has open."""

from __future__ import annotations

import gc
from ctypes import byref, c_size_t, c_uint64

from kvplan.cuda.device import Device
from kvplan.cuda.driver import SUCCESS
from kvplan.cuda.ipc.openings import Opening


def mappings() -> int:
    """Number of openings that were not closed."""
    return sum(isinstance(each, Opening) and each.present() != 0 for each in gc.get_objects())


def is_mapped(device: Device, address: int) -> bool:
    """Whether the driver knows an address as memory that the GPU may access."""
    start, nbytes, cu = c_uint64(), c_size_t(), device.driver
    with device.current():
        return bool(cu.cuMemGetAddressRange_v2(byref(start), byref(nbytes), address) == SUCCESS)
