"""The visitor's side: opened in the context of the GPU that runs the kernels."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest

from kvplan import KVLayout, PathError, TransferError
from kvplan.cuda.device import Device
from kvplan.cuda.ipc.exports import Export
from kvplan.cuda.ipc.openings import Opening
from kvplan.cuda.reach import Reach
from tests.cuda.ipc.conftest import FIRST, SECOND, names
from tests.simulated.objects import Tensor

HANDLE = bytes(range(64))
EXPORT = Export(SECOND, 0x10000, 0x4000, HANDLE)


@pytest.fixture
def opens(entries):
    """A driver that maps the handle at 0x7000000."""
    entries.gives |= {"cuIpcOpenMemHandle_v2": [0x7000000]}
    return entries


def test_a_handle_is_opened_in_the_context_of_the_gpu_that_runs_the_kernels(opens):
    device, begin = Device(0), len(opens.calls)
    contexts = []
    opens.gives["cuIpcOpenMemHandle_v2"] = lambda *_: contexts.append(opens.current.now) or [0x7000000]
    made = Opening(device, EXPORT)
    assert (made.address, made.nbytes, made.owner, made.ordinal) == (0x7000000, 0x4000, 1, 0)
    ((_, handle, flags),) = opens.named("cuIpcOpenMemHandle_v2")
    assert (bytes(handle), flags, contexts) == (HANDLE, 1, [0xC0])
    assert opens.current.now is None
    assert names(opens, begin) == ["cuIpcOpenMemHandle_v2"]
    made.close()
    assert opens.named("cuIpcCloseMemHandle") == [(0x7000000,)]
    made.close()
    assert len(opens.named("cuIpcCloseMemHandle")) == 1


def test_a_handle_that_the_driver_refuses(opens):
    opens.codes["cuIpcOpenMemHandle_v2"] = 201
    with pytest.raises(TransferError, match=r"of 16384 bytes of another process does not open on cuda:0.*must live"):
        Opening(Device(0), EXPORT)


def test_a_gpu_that_this_process_does_not_see(opens):
    with pytest.raises(PathError, match=rf"GPU-abc, .* it sees GPU-{FIRST}, GPU-{SECOND}.*CUDA_VISIBLE_DEVICES"):
        Opening(Device(0), replace(EXPORT, gpu="abc"))
    assert not opens.named("cuIpcOpenMemHandle_v2")


def test_a_gpu_that_cannot_reach_the_other(opens):
    opens.gives["cuDeviceCanAccessPeer"] = [0]
    with pytest.raises(PathError, match="cuda:0 cannot reach the memory of cuda:1: the driver allows no peer access"):
        Opening(Device(0), EXPORT)
    Opening(Device(1), EXPORT).close()  # its own memory


def test_a_child_of_a_fork_closes_nothing_of_its_parent(opens):
    made = Opening(Device(0), EXPORT)
    child = os.fork()
    if not child:
        made.close()
        os._exit(len(opens.named("cuIpcCloseMemHandle")))
    assert os.waitpid(child, 0)[1] == 0
    made.close()


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


def test_pieces_are_mapped_one_after_another(maps):
    device, begin = Device(1), len(maps.calls)
    made = Opening(device, PIECED, (30, 31, 32))
    assert (made.address, made.nbytes, made.owner, made.ordinal) == (0x9000000, 0x800000, 0, 1)
    assert [given[:2] for given in maps.named("cuMemMap")] == [
        (0x9000000, 0x200000), (0x9200000, 0x400000), (0x9600000, 0x200000)
    ]  # fmt: skip
    assert maps.named("cuMemRelease") == [(1030,), (1031,), (1032,)]
    ((start, nbytes, access, count),) = maps.named("cuMemSetAccess")
    found = access._obj
    assert (start, nbytes, found.kind, found.ordinal, found.flags, count) == (0x9000000, 0x800000, 1, 1, 3, 1)
    assert names(maps, begin)[0] == "cuMemAddressReserve"
    made.close()
    assert maps.named("cuMemUnmap") == [(0x9600000, 0x200000), (0x9200000, 0x400000), (0x9000000, 0x200000)]
    assert maps.named("cuMemAddressFree") == [(0x9000000, 0x800000)]


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
