"""GPU memory of another process: which memory may be opened, with the setting that helps; and what cannot be opened."""

from __future__ import annotations

import os
import uuid
from dataclasses import replace

import numpy as np
import pytest

from kvplan import KVLayout, PathError, TransferError
from kvplan.cuda import use
from kvplan.cuda.device import Device
from kvplan.cuda.ipc import Export, Opening, descriptors, exported
from kvplan.cuda.reach import Reach
from tests.simulated.entries import Entries
from tests.simulated.objects import Tensor

HANDLES = {0: 10, 1: 11}  # the driver's handles of the GPUs, by their number
CONTEXTS = {10: 0xC0, 11: 0xC1}
UUIDS = {10: bytes(range(16)), 11: bytes(range(16, 32))}
FIRST, SECOND = (str(uuid.UUID(bytes=raw)) for raw in UUIDS.values())


class Current:
    """The context of the calling thread."""

    now: int | None = None


@pytest.fixture
def entries():
    """The driver's entry points; `entries.current` has the context that is current."""
    made, current = Entries(), Current()
    made.current = current
    made.gives |= {
        "cuDeviceGetCount": [2],
        "cuDeviceGet": lambda _, ordinal: [HANDLES[ordinal]],
        "cuDevicePrimaryCtxRetain": lambda _, handle: [CONTEXTS[handle]],
        "cuDeviceGetUuid_v2": lambda _, handle: [UUIDS[handle]],
        "cuDeviceCanAccessPeer": [1],
        "cuCtxGetCurrent": lambda _: [current.now],
    }
    made.codes["cuCtxSetCurrent"] = lambda context: setattr(current, "now", context) or 0
    with use(made):
        yield made


# The owner's side.

LEGACY, KINDS, POOL = 10, 14, 17


def attributes(entries, **found):
    """Let the driver answer about an address: legacy, kinds and pool, each a number or a function of the address."""
    which = {LEGACY: found.get("legacy", 0), KINDS: found.get("kinds", 0), POOL: found.get("pool", 0)}

    def answer(_, attribute, address):
        given = which[attribute]
        return [given(address) if callable(given) else given]

    entries.gives["cuPointerGetAttribute"] = answer


def ranges(*pieces):
    """Let the driver know mapped pieces, each an address and its bytes."""

    def answer(_, __, address):
        return next([start, nbytes] for start, nbytes in pieces if start <= address < start + nbytes)

    return answer


PIECES = ((0x200000, 0x200000), (0x400000, 0x400000), (0x800000, 0x200000), (0xA00000, 0x200000))


@pytest.mark.parametrize(("told", "words"), [
    ({"kinds": 0}, ("expandable_segments:False", "--enable-sleep-mode")),
    ({"kinds": 8}, ("fabric handles only", "expandable_segments:False")),
    ({"kinds": 1, "pool": 0x77}, ("cudaMallocAsync", "backend:native")),
    ({"kinds": lambda address: int(address < 0x400000)}, ("at 0x400000", "expandable_segments:False")),
])  # fmt: skip
def test_memory_that_no_other_process_opens_is_refused_with_the_setting_that_helps(entries, told, words):
    attributes(entries, **told)
    entries.gives["cuMemGetAddressRange_v2"] = ranges(*PIECES)
    with pytest.raises(PathError, match="cannot be opened by another process") as caught:
        exported(Device(0), 0x200000, 0x400000)
    assert all(word in str(caught.value) for word in words)


EXPORT = Export(FIRST, 0x200000, 0x800000, b"", (0x200000, 0x400000, 0x200000))


def test_descriptors_are_closed_if_one_is_missing(entries, monkeypatch):
    closed = []
    monkeypatch.setattr(os, "close", closed.append)
    entries.gives["cuMemExportToShareableHandle"] = [7]
    entries.codes["cuMemExportToShareableHandle"] = lambda *_: (
        304 if len(entries.named("cuMemExportToShareableHandle")) == 3 else 0
    )
    with pytest.raises(TransferError, match=r"2097152 bytes at 0x800000"):
        descriptors(Device(0), EXPORT)
    assert closed == [7, 7]
    assert len(entries.named("cuMemRelease")) == 3


# The visitor's side.

HANDLE = bytes(range(64))
HANDLED = Export(SECOND, 0x10000, 0x4000, HANDLE)


@pytest.fixture
def opens(entries):
    """A driver that maps the handle at 0x7000000."""
    entries.gives |= {"cuIpcOpenMemHandle_v2": [0x7000000]}
    return entries


def test_a_gpu_that_this_process_does_not_see(opens):
    with pytest.raises(PathError, match=rf"GPU-abc, .* it sees GPU-{FIRST}, GPU-{SECOND}.*CUDA_VISIBLE_DEVICES"):
        Opening(Device(0), replace(HANDLED, gpu="abc"))
    assert not opens.named("cuIpcOpenMemHandle_v2")


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
    made = Opening(Device(0), HANDLED)
    for device, named in ((Device(0), "cuda:1"), (Device(1), "cuda:1"), (Device(1), "cuda:0")):
        layout = KVLayout.from_tensors("block dim", Tensor(np.zeros((16, 256), np.uint8), named))
        regions = tuple(replace(region, owner=made) for region in layout.regions)
        why = Reach(device).facts(KVLayout(layout.built._replace(regions=regions))).unreachable
        expected = f"memory of another process at {made.address:#x} was opened for cuda:0; let an executor of cuda:0"
        assert why.startswith(expected) if device.ordinal else why == ""
    assert not opens.named("cuCtxEnablePeerAccess")  # the opening enabled it
    made.close()
