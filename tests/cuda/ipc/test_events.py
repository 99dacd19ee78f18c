"""Events that two processes share, and words that a stream writes and another process reads."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from kvplan import LayoutError, TransferError
from kvplan.cuda.device import Device
from kvplan.cuda.handles import event_handle
from kvplan.cuda.ipc import interprocess_event
from kvplan.cuda.ipc.interprocess_event import InterprocessEvent
from kvplan.cuda.ipc.shared_words import SharedWords

HANDLE = bytes(range(64))


@pytest.fixture
def events(entries):
    entries.gives |= {
        "cuEventCreate": [0xE1],
        "cuIpcGetEventHandle": [{"reserved": tuple(HANDLE)}],
        "cuIpcOpenEventHandle": [0xE2],
    }
    return entries


def test_an_event_is_made_recorded_waited_for_and_destroyed(events):
    made = InterprocessEvent(Device(1))
    assert (made.cuda_event, made.handle, event_handle(made)) == (0xE1, HANDLE, 0xE1)
    assert [given[1:] for given in events.named("cuEventCreate")] == [(6,)]  # interprocess, without timing
    assert [given[1:] for given in events.named("cuIpcGetEventHandle")] == [(0xE1,)]
    made.record(0x51)
    made.wait(0x52)
    assert events.named("cuEventRecord") == [(0xE1, 0x51)]
    assert events.named("cuStreamWaitEvent") == [(0x52, 0xE1, 0)]
    events.codes["cuEventQuery"] = 600
    assert not made.passed()
    events.codes["cuEventQuery"] = 0
    assert made.passed()
    events.codes["cuEventQuery"] = 719
    with pytest.raises(TransferError, match="cuEventQuery returned"):
        made.passed()
    made.synchronize()
    made.close()
    made.close()
    assert events.named("cuEventDestroy_v2") == [(0xE1,)]
    with pytest.raises(TransferError, match="the event is closed"):
        made.record(0x51)


def test_an_event_of_another_process_is_opened_by_its_handle(events):
    opened = InterprocessEvent.opened(Device(0), HANDLE)
    ((_, handle),) = events.named("cuIpcOpenEventHandle")
    assert (bytes(handle), opened.cuda_event) == (HANDLE, 0xE2)
    assert not events.named("cuEventCreate")
    opened.close()
    assert events.named("cuEventDestroy_v2") == [(0xE2,)]
    with pytest.raises(LayoutError, match="has 63 bytes; expected 64"):
        InterprocessEvent.opened(Device(0), HANDLE[1:])
    events.codes["cuIpcOpenEventHandle"] = 400
    with pytest.raises(TransferError, match="cuIpcOpenEventHandle returned"):
        InterprocessEvent.opened(Device(0), HANDLE)


def test_an_event_without_a_handle_is_destroyed(events):
    events.codes["cuIpcGetEventHandle"] = 801
    with pytest.raises(TransferError, match="cuIpcGetEventHandle returned"):
        InterprocessEvent(Device(0))
    assert events.named("cuEventDestroy_v2") == [(0xE1,)]


def test_a_child_of_a_fork_leaves_its_parent_s_event_alone(events, monkeypatch):
    made = InterprocessEvent(Device(0))
    monkeypatch.setattr(interprocess_event, "generation", lambda: made._made_in + 1)
    with pytest.raises(TransferError, match="of the parent"):
        made.passed()
    made.close()
    assert not events.named("cuEventDestroy_v2")


# Words.


def opened_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_stream_writes_a_word_after_its_work(entries):
    entries.gives["cuPointerGetAttribute"] = lambda _, attribute, address: [address]
    before = opened_descriptors()
    with SharedWords() as mine, SharedWords.opened(os.dup(mine.descriptor)) as theirs:
        device = Device(0)
        mine.pin(device)
        mine.pin(device)
        address = mine._words.ctypes.data
        assert entries.named("cuMemHostRegister_v2") == [(address, 4096, 3)]
        mine.write(device, 0x51, 2, 1 << 40)
        assert entries.named("cuStreamWriteValue64_v2") == [(0x51, address + 16, 1 << 40, 0)]
        entries.codes["cuStreamWriteValue64_v2"] = 719
        with pytest.raises(TransferError, match="cuStreamWriteValue64 returned"):
            mine.write(device, 0x51, 2, 1)
        mine.store(511, (1 << 64) - 1)
        assert (theirs.load(511), theirs.load(2)) == ((1 << 64) - 1, 0)
        assert theirs.descriptor == -1
    assert entries.named("cuMemHostUnregister") == [(address,)]
    mine.close()
    assert opened_descriptors() == before


def test_memory_that_has_another_address_on_the_gpu_is_refused_and_unpinned(entries):
    entries.gives["cuPointerGetAttribute"] = [0x1234]
    with SharedWords() as mine, pytest.raises(TransferError, match="has another address on cuda:0"):
        mine.pin(Device(0))
    assert len(entries.named("cuMemHostUnregister")) == 1


@pytest.mark.parametrize(("nbytes", "seals"), [
    (4096, 0), (4096, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL), (4095, 7), (0, 7), (8192, 7),
])  # fmt: skip
def test_a_page_that_could_shrink_or_has_another_size_is_refused(nbytes, seals):
    """A process that reads beyond a file's end gets a signal that ends it."""
    before = opened_descriptors()
    descriptor = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    if seals:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    with pytest.raises(LayoutError, match=f"a descriptor of {nbytes} bytes came; expected a page of 4096 bytes"):
        SharedWords.opened(descriptor)
    assert opened_descriptors() == before


def test_a_descriptor_that_is_no_memory_is_refused():
    before = opened_descriptors()
    reading, writing = os.pipe()
    with pytest.raises(LayoutError, match="a descriptor of 0 bytes came"):
        SharedWords.opened(reading)
    os.close(writing)
    assert opened_descriptors() == before
