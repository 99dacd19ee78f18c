"""Two processes and one GPU: memory, events and words that both share."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import kvplan
from kvplan import KVLayout
from kvplan.cuda.device import Device
from kvplan.cuda.ipc.exports import exported
from kvplan.cuda.ipc.shared_words import RELEASED, SharedWords
from tests.gpu.gate import Gate
from tests.gpu.processes.mappings import mappings
from tests.gpu.processes.moving import NBYTES, NHD, SHAPE, every_path, memories, pull_and_push
from tests.gpu.processes.owner import SEED, pattern
from tests.gpu.processes.visiting import is_mapped, owner, refused

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@memories
@every_path
def test_blocks_are_pulled_and_pushed(path, memory):
    with owner(0, NBYTES, **memory) as visited, visited.open(0) as (address, opening):
        assert (opening.owner, opening.ordinal, mappings()) == (0, 0, 1)
        pull_and_push(visited, visited.layout(NHD, address, SHAPE, 0), path)
    assert mappings() == 0


@memories
def test_a_stream_waits_for_another_process_s_stream(memory):
    device, mine = Device(0), torch.zeros(NBYTES, dtype=torch.uint8, device="cuda:0")
    shape, blocks = (NBYTES // 65536, 65536), NBYTES // 65536
    torch.cuda.synchronize()
    with SharedWords() as words, owner(0, NBYTES, **memory) as visited, visited.open(0) as (address, _):
        words.pin(device)
        visited.ask("words", send=(words.descriptor,))
        here = KVLayout.from_tensors("block dim", mine.view(shape))
        program = kvplan.compile(visited.layout("block dim", address, shape, 0), here)
        stream = torch.cuda.Stream()
        with kvplan.Executor("cuda:0", kvplan.Policy(path="kernel")) as executor:
            for number, seed in ((1, 21), (2, 22)):
                visited.ask("write_late", seed, 9, number)
                with device.current():
                    words.wait(device, stream.cuda_stream, 9, number)
                executor.submit(program.plan(range(blocks), range(blocks)), after=stream).synchronize()
                assert torch.equal(mine, pattern(NBYTES, "cuda:0", seed))


def test_another_process_waits_for_a_stream_of_this_one():
    device = Device(0)
    with SharedWords() as words, owner(0, NBYTES) as visited, visited.open(0) as (address, _):
        words.pin(device)
        visited.ask("words", send=(words.descriptor,))
        shape, blocks = (NBYTES // 65536, 65536), NBYTES // 65536
        there = visited.layout("block dim", address, shape, 0)
        stream = torch.cuda.Stream()
        with kvplan.Executor("cuda:0", kvplan.Policy(path="kernel")) as executor:
            new = pattern(NBYTES, "cuda:0", 31)
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(200_000_000)
            here = KVLayout.from_tensors("block dim", new.view(shape))
            plan = kvplan.compile(here, there).plan(range(blocks), range(blocks))
            transfer = executor.submit(plan, after=stream)
            transfer.wait(stream)
            with device.current():
                words.write(device, stream.cuda_stream, 9, 1)
            assert visited.ask("wait_and_read", 31, 9, 1)
            transfer.synchronize()
            stream.synchronize()


def test_a_stream_goes_on_when_the_process_that_it_waits_for_has_died():
    device, stream = Device(0), torch.cuda.Stream()
    with SharedWords() as words:
        words.pin(device)
        with device.current():
            words.wait(device, stream.cuda_stream, 9, 5)
        event = stream.record_event()
        assert not event.query()
        words.store(9, RELEASED)  # by the CPU
        event.synchronize()


def test_a_page_is_pinned_while_a_stream_is_busy():
    """An owner publishes while its GPU computes, and its CPU must not wait."""
    torch.zeros(1, device="cuda:0")
    with Gate(torch.cuda.Stream()) as gate, SharedWords() as words:
        words.pin(Device(0))
        assert not gate.expired
        gate.open()


def test_a_word_is_seen_without_a_call_of_the_driver():
    device, stream = Device(0), torch.cuda.Stream()
    with SharedWords() as words, owner(0, MIB) as visited:
        words.pin(device)
        visited.ask("words", send=(words.descriptor,))
        for value in range(1, 100):
            with device.current():
                words.write(device, stream.cuda_stream, 5, value)
            assert visited.ask("see_word", 5, value)
        assert words.load(5) == 99
        stream.synchronize()


def test_the_driver_counts_openings_of_a_handle():
    with owner(0, MIB) as visited:
        with visited.open(0) as (first, _):
            with visited.open(0) as (second, _):
                assert (first == second, mappings()) == (True, 2)
            assert is_mapped(Device(0), first)
        assert mappings() == 0
        for _ in range(20):
            with visited.open(0) as (_, opening):
                assert opening.nbytes >= MIB
        assert mappings() == 0


@memories
def test_nothing_is_left_behind(memory):
    """The driver is asked whether it still maps the address: figures of free memory are those of all processes."""
    device = Device(0)
    with owner(0, NBYTES, **memory) as visited:
        files = set()
        for _ in range(10):
            with visited.open(0) as (address, _):
                assert is_mapped(device, address)
            assert not is_mapped(device, address)
            files.add(len(list(Path("/proc/self/fd").iterdir())))
    assert len(files) == 1


def test_memory_of_an_owner_that_died_closes():
    with owner(0, NBYTES) as visited, visited.open(0) as (address, _):
        visited.tell("die")
        visited.process.wait(60)
        assert address
    assert mappings() == 0
    torch.zeros(4, device="cuda:0").add_(1)
    torch.cuda.synchronize()


def test_a_handle_of_an_owner_that_died_is_refused():
    with owner(0, NBYTES) as visited:
        told = visited.ask("export")
        visited.tell("die")
        visited.process.wait(60)
        visited.ask = lambda name, *_: told
        assert "does not open on cuda:0" in refused(visited, 0)


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


def test_memory_that_is_no_gpu_s():
    array = np.zeros(64, np.uint8)
    with pytest.raises(kvplan.TransferError, match="is no memory of cuda:0"):
        exported(Device(0), array.ctypes.data, 64)


def test_the_owner_s_own_process_does_not_open_its_handle():
    from kvplan.cuda.ipc.openings import Opening

    tensor = pattern(MIB, "cuda:0", SEED)
    with pytest.raises(kvplan.TransferError, match="must live, and be another one"):
        Opening(Device(0), exported(Device(0), tensor.data_ptr(), tensor.numel())).close()
    assert os.getpid()
