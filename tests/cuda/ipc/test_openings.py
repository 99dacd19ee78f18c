"""The visitor's side: opened in the context of the GPU that runs the kernels, once a handle, and closed by the last."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvplan import KVLayout, LayoutError, PathError, TransferError
from kvplan.cuda.device import Device
from kvplan.cuda.ipc import openings
from kvplan.cuda.ipc.exports import Export
from kvplan.cuda.ipc.openings import mapped_on, mappings, opened
from kvplan.cuda.reach import Reach
from tests.cuda.ipc.conftest import FIRST, SECOND, names
from tests.simulated.objects import Tensor

HANDLE = bytes(range(64))
EXPORT = Export(SECOND, 0x10000, 0x4000, HANDLE)


@pytest.fixture
def opens(entries):
    """A driver that maps the handle at 0x7000000."""
    entries.gives |= {"cuIpcOpenMemHandle_v2": [0x7000000], "cuMemGetAddressRange_v2": [0x7000000, 0x4000]}
    return entries


def test_a_handle_is_opened_in_the_context_of_the_gpu_that_runs_the_kernels(opens):
    device, begin = Device(0), len(opens.calls)
    contexts = []
    opens.gives["cuIpcOpenMemHandle_v2"] = lambda *_: contexts.append(opens.current.now) or [0x7000000]
    made = opened(device, EXPORT)
    assert (made.address, made.nbytes, made.owner, made.ordinal) == (0x7000000, 0x4000, 1, 0)
    ((_, handle, flags),) = opens.named("cuIpcOpenMemHandle_v2")
    assert (bytes(handle), flags, contexts) == (HANDLE, 1, [0xC0])
    assert opens.current.now is None
    assert names(opens, begin) == ["cuIpcOpenMemHandle_v2", "cuMemGetAddressRange_v2"]
    made.close()
    assert opens.named("cuIpcCloseMemHandle") == [(0x7000000,)]
    made.close()
    assert len(opens.named("cuIpcCloseMemHandle")) == 1


def test_a_handle_opens_once_and_closes_with_its_last_user(opens):
    device = Device(0)
    some = [opened(device, EXPORT) for _ in range(3)]
    assert len(opens.named("cuIpcOpenMemHandle_v2")) == mappings() == 1
    assert {each.address for each in some} == {0x7000000}
    for each in some[:2]:
        each.close()
        each.close()
    assert not opens.named("cuIpcCloseMemHandle")
    some[2].close()
    assert len(opens.named("cuIpcCloseMemHandle")) == 1
    assert mappings() == 0
    opened(device, EXPORT).close()
    assert len(opens.named("cuIpcOpenMemHandle_v2")) == 2


def test_each_context_opens_a_handle(opens):
    addresses = iter([0x7000000, 0x8000000])
    opens.gives["cuIpcOpenMemHandle_v2"] = lambda *_: [next(addresses)]
    opens.gives["cuMemGetAddressRange_v2"] = lambda _, __, address: [address, 0x4000]
    first, second = opened(Device(0), EXPORT), opened(Device(1), EXPORT)
    assert (first.address, second.address, mappings()) == (0x7000000, 0x8000000, 2)
    assert [mapped_on(at) for at in (0x7000000, 0x7003FFF, 0x7004000, 0x8000000)] == [0, 0, None, 1]
    first.close()
    second.close()


@pytest.mark.parametrize("known", [False, True])
def test_a_handle_that_maps_less_than_the_card_promises_is_refused(opens, known):
    device, more = Device(0), replace(EXPORT, nbytes=0x4001)
    if known:
        held = opened(device, EXPORT)
    with pytest.raises(LayoutError, match=r"maps 16384 bytes; its card promises 16385"):
        opened(device, more)
    assert mappings() == int(known)
    if known:
        held.close()
    assert len(opens.named("cuIpcCloseMemHandle")) == 1


def test_a_handle_that_the_driver_refuses(opens):
    opens.codes["cuIpcOpenMemHandle_v2"] = 201
    with pytest.raises(TransferError, match=r"of 16384 bytes of another process does not open on cuda:0.*must live"):
        opened(Device(0), EXPORT)
    assert mappings() == 0


def test_a_gpu_that_this_process_does_not_see(opens):
    with pytest.raises(PathError, match=rf"GPU-abc, .* it sees GPU-{FIRST}, GPU-{SECOND}.*CUDA_VISIBLE_DEVICES"):
        opened(Device(0), replace(EXPORT, gpu="abc"))
    assert not opens.named("cuIpcOpenMemHandle_v2")


def test_a_gpu_that_cannot_reach_the_other(opens):
    opens.gives["cuDeviceCanAccessPeer"] = [0]
    with pytest.raises(PathError, match="cuda:0 cannot reach the memory of cuda:1: the driver allows no peer access"):
        opened(Device(0), EXPORT)
    opened(Device(1), EXPORT).close()  # its own memory


def test_a_child_of_a_fork_closes_nothing_of_its_parent(opens, monkeypatch):
    made = opened(Device(0), EXPORT)
    openings._processes[0].lock.acquire()  # by a thread that the child does not have
    child = made._mapping.made_in + 1
    monkeypatch.setattr(openings, "generation", lambda: child)
    made.close()
    assert mappings() == 0
    assert not opens.named("cuIpcCloseMemHandle")


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
        "cuMemGetAddressRange_v2": lambda _, __, address: [address, entries.at[address]],
    }

    def mapped(at, nbytes, offset, handle, flags):
        assert (offset, flags) == (0, 0)
        entries.at[at] = entries.sizes[handle - 1000]
        return 1 if nbytes > entries.at[at] else 0

    entries.codes["cuMemMap"] = mapped
    return entries


def test_pieces_are_mapped_one_after_another(maps):
    asked = []

    def fetch(first, last):
        asked.append((first, last))
        return list(range(30 + first, 30 + last))

    device, begin = Device(1), len(maps.calls)
    made = opened(device, PIECED, fetch)
    assert (made.address, made.nbytes, made.owner, made.ordinal) == (0x9000000, 0x800000, 0, 1)
    assert asked == [(0, 3)]
    assert [given[:2] for given in maps.named("cuMemMap")] == [
        (0x9000000, 0x200000), (0x9200000, 0x400000), (0x9600000, 0x200000)
    ]  # fmt: skip
    assert maps.named("cuMemRelease") == [(1030,), (1031,), (1032,)]
    ((start, nbytes, access, count),) = maps.named("cuMemSetAccess")
    found = access._obj
    assert (start, nbytes, found.kind, found.ordinal, found.flags, count) == (0x9000000, 0x800000, 1, 1, 3, 1)
    assert names(maps, begin)[0] == "cuMemAddressReserve"
    assert (mappings(), mapped_on(0x9000000 + 0x7FFFFF)) == (1, 1)
    made.close()
    assert maps.named("cuMemUnmap") == [(0x9000000, 0x200000), (0x9200000, 0x400000), (0x9600000, 0x200000)]
    assert maps.named("cuMemAddressFree") == [(0x9000000, 0x800000)]
    assert mappings() == 0


def test_descriptors_are_fetched_in_portions(maps, monkeypatch):
    monkeypatch.setattr(openings, "PORTION", 2)
    asked = []
    opened(Device(0), PIECED, lambda first, last: asked.append((first, last)) or range(30 + first, 30 + last)).close()
    assert asked == [(0, 2), (2, 3)]


def test_a_piece_that_is_smaller_leaves_nothing_mapped(maps):
    maps.sizes[31] = 0x200000
    with pytest.raises(LayoutError, match="has fewer than the 4194304 bytes that its card promises"):
        opened(Device(0), PIECED, lambda first, last: range(30 + first, 30 + last))
    assert maps.named("cuMemUnmap") == [(0x9000000, 0x200000)]
    assert maps.named("cuMemAddressFree") == [(0x9000000, 0x800000)]
    assert maps.named("cuMemRelease") == [(1030,), (1031,)]
    assert mappings() == 0


@pytest.mark.parametrize("call", ["cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"])
def test_a_call_that_fails_leaves_nothing_mapped(maps, call):
    maps.codes[call] = 719
    with pytest.raises(TransferError, match=f"{call} returned"):
        opened(Device(0), PIECED, lambda first, last: range(30 + first, 30 + last))
    assert len(maps.named("cuMemUnmap")) == (3 if call == "cuMemSetAccess" else 0)
    assert len(maps.named("cuMemAddressFree")) == 1
    assert mappings() == 0


def test_too_few_descriptors_leave_nothing_mapped(maps):
    with pytest.raises(LayoutError, match="2 descriptors came for 3 pieces"):
        opened(Device(0), PIECED, lambda first, last: [30, 31])
    assert maps.named("cuMemAddressFree") == [(0x9000000, 0x800000)]


def test_pieces_need_descriptors(entries):
    with pytest.raises(PathError, match="needs a handle, or pieces with their descriptors"):
        opened(Device(0), PIECED)
    assert not entries.named("cuMemAddressReserve")


class Elsewhere(Tensor):
    """A tensor at an address that a driver gave."""

    address = 0

    def data_ptr(self) -> int:
        return self.address


def test_an_executor_of_another_gpu_is_refused_before_its_kernel_faults(opens):
    made = opened(Device(0), EXPORT)
    for device, named in ((Device(0), "cuda:1"), (Device(1), "cuda:1"), (Device(1), "cuda:0")):
        tensor = Elsewhere(np.zeros((16, 256), np.uint8), named)
        tensor.address = made.address
        layout = KVLayout.from_tensors("block dim", tensor)
        why = Reach(device).facts(layout).unreachable
        expected = f"memory of another process at {made.address:#x} was opened for cuda:0; let an executor of cuda:0"
        assert why.startswith(expected) if device.ordinal else why == ""
    assert not opens.named("cuCtxEnablePeerAccess")  # the opening enabled it
    made.close()
