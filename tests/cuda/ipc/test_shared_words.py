"""Words that a stream of one process writes, and that the CPU and streams of another process wait for."""

from __future__ import annotations

import os

import pytest

from kvplan import LayoutError, TransferError
from kvplan.cuda.device import Device
from kvplan.cuda.ipc.shared_words import PAGE, SharedWords
from tests.open_files import open_files


def test_a_stream_writes_a_word_after_its_work(entries):
    before = open_files()
    with SharedWords() as mine, SharedWords.opened(mine.descriptor) as theirs:
        device = Device(0)
        mine.pin(device)
        mine.pin(device)
        address = mine.address(0)
        assert entries.named("cuMemHostRegister_v2") == [(address, PAGE, 3)]
        mine.write(device, 0x51, 2, 1 << 40)
        assert entries.named("cuStreamWriteValue64_v2") == [(0x51, address + 16, 1 << 40, 0)]
        mine.wait(device, 0x52, 3, 7)
        assert entries.named("cuStreamWaitValue64_v2") == [(0x52, address + 24, 7, 0)]
        entries.codes |= {"cuStreamWriteValue64_v2": 719, "cuStreamWaitValue64_v2": 801}
        with pytest.raises(TransferError, match="cuStreamWaitValue64 returned"):
            mine.wait(device, 0x52, 3, 7)
        with pytest.raises(TransferError, match="cuStreamWriteValue64 returned"):
            mine.write(device, 0x51, 2, 1)
        mine.store(2047, (1 << 64) - 1)
        assert (theirs.load(2047), theirs.load(2)) == ((1 << 64) - 1, 0)
        assert theirs.descriptor == -1
    assert entries.named("cuMemHostUnregister") == [(address,)]
    mine.close()
    assert open_files() <= before


def test_a_descriptor_of_another_size_is_refused():
    before = open_files()
    descriptor = os.memfd_create("other")
    os.ftruncate(descriptor, PAGE - 1)
    with pytest.raises(LayoutError, match=f"a descriptor of no words of {PAGE} bytes came"):
        SharedWords.opened(descriptor)
    os.close(descriptor)
    assert open_files() <= before


def test_a_descriptor_that_is_no_memory_is_refused():
    before = open_files()
    reading, writing = os.pipe()
    with pytest.raises(LayoutError, match="a descriptor of no words"):
        SharedWords.opened(reading)
    os.close(reading)
    os.close(writing)
    assert open_files() <= before
