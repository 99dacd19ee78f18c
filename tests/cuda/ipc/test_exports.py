"""The owner's side: which memory another process may open, and how; or the setting that helps."""

from __future__ import annotations

import pytest

from kvplan import PathError, TransferError
from kvplan.cuda.device import Device
from kvplan.cuda.ipc import exports
from kvplan.cuda.ipc.exports import Export, descriptors, exported
from tests.cuda.ipc.conftest import FIRST

LEGACY, KINDS, POOL = 10, 14, 17


def attributes(entries, **found):
    """Let the driver answer about an address: legacy, kinds and pool, each a number or a function of the address."""
    which = {LEGACY: found.get("legacy", 0), KINDS: found.get("kinds", 0), POOL: found.get("pool", 0)}

    def answer(_, attribute, address):
        given = which[attribute]
        return [given(address) if callable(given) else given]

    entries.gives["cuPointerGetAttribute"] = answer


def test_bytes_of_two_allocations_have_no_handle(entries):
    attributes(entries, legacy=1)
    entries.gives["cuMemGetAddressRange_v2"] = [0x10000, 0x4000]
    with pytest.raises(PathError, match=r"12289 bytes at 0x11000 of cuda:0 are of several allocations"):
        exported(Device(0), 0x11000, 0x3001)
    assert not entries.named("cuIpcGetMemHandle")


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
    monkeypatch.setattr(exports.os, "close", closed.append)
    entries.gives["cuMemExportToShareableHandle"] = [7]
    entries.codes["cuMemExportToShareableHandle"] = lambda *_: (
        304 if len(entries.named("cuMemExportToShareableHandle")) == 3 else 0
    )
    with pytest.raises(TransferError, match=r"2097152 bytes at 0x800000"):
        descriptors(Device(0), EXPORT)
    assert closed == [7, 7]
    assert len(entries.named("cuMemRelease")) == 3
