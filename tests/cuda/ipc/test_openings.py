"""The visitor's side: what cannot be opened, and by which GPU's executor it is reached."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvplan import KVLayout, PathError, TransferError
from kvplan.cuda.device import Device
from kvplan.cuda.ipc.exports import Export
from kvplan.cuda.ipc.openings import Opening
from kvplan.cuda.reach import Reach
from tests.cuda.ipc.conftest import FIRST, SECOND
from tests.simulated.objects import Tensor

HANDLE = bytes(range(64))
EXPORT = Export(SECOND, 0x10000, 0x4000, HANDLE)


@pytest.fixture
def opens(entries):
    """A driver that maps the handle at 0x7000000."""
    entries.gives |= {"cuIpcOpenMemHandle_v2": [0x7000000]}
    return entries


def test_a_gpu_that_this_process_does_not_see(opens):
    with pytest.raises(PathError, match=rf"GPU-abc, .* it sees GPU-{FIRST}, GPU-{SECOND}.*CUDA_VISIBLE_DEVICES"):
        Opening(Device(0), replace(EXPORT, gpu="abc"))
    assert not opens.named("cuIpcOpenMemHandle_v2")


def test_a_gpu_that_cannot_reach_the_other(opens):
    opens.gives["cuDeviceCanAccessPeer"] = [0]
    with pytest.raises(PathError, match="cuda:0 cannot reach the memory of cuda:1: the driver allows no peer access"):
        Opening(Device(0), EXPORT)
    Opening(Device(1), EXPORT).close()  # its own memory


# Memory of pieces.

PIECED = Export(FIRST, 0x200000, 0x800000, b"", (0x200000, 0x400000, 0x200000))


@pytest.fixture
def maps(entries):
    """A driver that maps pieces; of each descriptor, how many bytes it has."""
    entries.sizes = {30: 0x200000, 31: 0x400000, 32: 0x200000}
    entries.at = {}
    entries.gives |= {
        "cuMemAddressReserve": [0x9000000],
        "cuMemImportFromShareableHandle": lambda _, descriptor, __: [descriptor + 1000],
    }

    def mapped(at, nbytes, offset, handle, flags):
        assert (offset, flags) == (0, 0)
        entries.at[at] = entries.sizes[handle - 1000]
        return 1 if nbytes > entries.at[at] else 0

    entries.codes["cuMemMap"] = mapped
    return entries


@pytest.mark.parametrize("call", ["cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"])
def test_a_call_that_fails_leaves_nothing_mapped(maps, call):
    maps.codes[call] = 719
    with pytest.raises(TransferError, match=f"{call} returned"):
        Opening(Device(0), PIECED, (30, 31, 32))
    assert len(maps.named("cuMemUnmap")) == (3 if call == "cuMemSetAccess" else 0)
    assert len(maps.named("cuMemAddressFree")) == 1


def test_an_executor_of_another_gpu_is_refused_before_its_kernel_faults(opens):
    made = Opening(Device(0), EXPORT)
    for device, named in ((Device(0), "cuda:1"), (Device(1), "cuda:1"), (Device(1), "cuda:0")):
        layout = KVLayout.from_tensors("block dim", Tensor(np.zeros((16, 256), np.uint8), named))
        regions = tuple(replace(region, owner=made) for region in layout.regions)
        why = Reach(device).facts(KVLayout(layout.built._replace(regions=regions))).unreachable
        expected = f"memory of another process at {made.address:#x} was opened for cuda:0; let an executor of cuda:0"
        assert why.startswith(expected) if device.ordinal else why == ""
    assert not opens.named("cuCtxEnablePeerAccess")  # the opening enabled it
    made.close()
