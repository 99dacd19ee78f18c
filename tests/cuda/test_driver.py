"""The driver's entry points, held against a driver that is none: Python functions stand in for them."""

from __future__ import annotations

import ctypes
import mmap
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import kvplan
from kvplan.cuda import driver as cuda
from kvplan.cuda import use
from kvplan.cuda.device import Device, DriverError
from kvplan.cuda.driver import Driver
from kvplan.cuda.handles import current_stream
from kvplan.memory import pinning
from tests.simulated.entries import SimpleEntry


def test_a_device_says_what_it_is(entries, device):
    assert (device.arch, device.multiprocessors, device.max_pitch) == (90, 132, 1 << 31 - 1)
    assert (device.ordinal, device.context) == (1, 0xC0)
    assert device.driver is cuda.driver()
    assert device.driver.version == 12080
    assert entries.named("cuInit") == [(0,)]


@pytest.mark.parametrize("ordinal", [2, 99])
def test_a_device_that_is_not_there(entries, ordinal):
    with pytest.raises(kvplan.TransferError, match=f"there is no CUDA device {ordinal}; 2 are visible"):
        Device(ordinal)
    with pytest.raises(kvplan.PathError, match=f"path 'kernel' cannot serve device 'cuda:{ordinal}': there is no CUDA"):
        kvplan.Executor(device=f"cuda:{ordinal}", policy=kvplan.Policy(path="kernel"))


def test_a_device_without_a_number_is_torch_s_current_one(entries, monkeypatch):
    entries.codes["cuDeviceGetCount"] = 100
    for available, name in ((False, "cuda:0"), (True, "cuda:1")):
        cuda_of_torch = SimpleNamespace(is_available=lambda available=available: available, current_device=lambda: 1)
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda_of_torch))
        with pytest.raises(kvplan.PathError, match=f"no path serves device '{name}': cuDeviceGetCount"):
            kvplan.Executor(device="cuda")


def test_the_current_stream_is_torch_s(monkeypatch):
    def torch(started, **extra):
        stream = SimpleNamespace(cuda_stream=0x51)
        cuda_of_torch = SimpleNamespace(is_initialized=lambda: started, current_stream=lambda ordinal: stream)
        return SimpleNamespace(cuda=cuda_of_torch, _C=SimpleNamespace(**extra))

    for module, handle in (
        (torch(started=False), None),
        (torch(started=True, _cuda_getCurrentRawStream=lambda ordinal: 0x52 + ordinal), 0x53),
    ):
        monkeypatch.setitem(sys.modules, "torch", module)
        assert current_stream(1) == handle


def test_no_driver_and_one_too_old(entries, monkeypatch):
    entries.missing.add("cuMemHostRegister_v2")
    too_old = r"too old \(12\.0 is the first that serves\): cuMemHostRegister_v2"
    with pytest.raises(kvplan.TransferError, match=too_old), use(entries):
        pass

    def absent(path):
        raise OSError(f"{path}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    cuda.loaded.cache_clear()
    with pytest.raises(kvplan.TransferError, match=r"there is no CUDA driver: libcuda\.so\.1"):
        cuda.loaded()


def test_a_driver_that_does_not_start(entries):
    entries.codes["cuInit"] = 999
    with pytest.raises(DriverError, match=r"cuInit returned CUDA_ERROR_PLAYED \(999, it was played\)"), use(entries):
        pass


@pytest.mark.parametrize(("address", "code"), [(None, 0), (0x1000, 500)])
def test_a_driver_without_batches_may_say_so_in_two_ways(entries, address, code):
    entries.gives["cuGetProcAddress_v2"] = [address]
    if code:
        entries.codes["cuGetProcAddress_v2"] = code
    assert Driver(entries, entries).cuMemcpyBatchAsync is None


def test_errors_that_nobody_knows_have_a_number(device):
    assert device.driver.name(12345) == "an unknown error (12345, )"
    with pytest.raises(AttributeError):
        device.driver.cuWhatever  # noqa: B018


FAILING = {
    "cuStreamCreateWithPriority": lambda device: device.stream(),
    "cuCtxGetStreamPriorityRange": lambda device: device.stream(urgent=True),
    "cuEventCreate": lambda device: device.event(),
    "cuEventRecord": lambda device: device.record(1, 2),
    "cuStreamWaitEvent": lambda device: device.wait(1, 2),
    "cuEventElapsedTime": lambda device: device.seconds(1, 2),
    "cuMemAlloc_v2": lambda device: device.allocate(4096),
    "cuMemHostAlloc": lambda device: device.allocate_host(4096),
    "cuModuleLoadData": lambda device: device.load(b"image", "copy_rows", 0),
    "cuModuleGetFunction": lambda device: device.load(b"image", "copy_rows", 0),
    "cuFuncSetAttribute": lambda device: device.load(b"image", "copy_rows", 1 << 20),
    "cuMemcpyAsync": lambda device: device.copy(1, 2, 3, 4),
}


@pytest.mark.parametrize("call", FAILING)
def test_a_call_that_fails_is_named_with_its_code(entries, device, call):
    FAILING[call](device)
    entries.codes[call] = 719
    with pytest.raises(DriverError, match=rf"{call.removesuffix('_v2')} returned CUDA_ERROR_PLAYED \(719") as caught:
        FAILING[call](device)
    assert caught.value.code == 719


def test_a_batch_is_called_by_address(entries):
    entries.gives["cuGetProcAddress_v2"] = [0x1234, 0]
    with use(entries):
        device = Device(0)
    assert entries.named("cuGetProcAddress_v2")[-1][0] == b"cuMemcpyBatchAsync"
    assert entries.named("cuGetProcAddress_v2")[-1][2] == 12080
    assert device.driver.cuMemcpyBatchAsync.value == 0x1234


def pages_of(array):
    start = array.ctypes.data
    return pinning.registrations([(start, start + 20_000)], [pinning.Rows(start, (100,))], 4096, 8192)


def test_pinned_memory_is_registered_in_pieces_and_let_go_of_with_its_array(entries):
    array = np.frombuffer(mmap.mmap(-1, 20_480), np.uint8)
    start = array.ctypes.data
    pinning.register([array], pages_of(array), 0)
    registered = [arguments[:2] for arguments in entries.named("cuMemHostRegister_v2")]
    assert registered == [(start, 8192), (start + 8192, 8192), (start + 16_384, 4096)]
    view = array[10:].reshape(-1, 5)
    del array
    assert not entries.named("cuMemHostUnregister")
    del view
    assert entries.named("cuMemHostUnregister") == [(first,) for first, _ in registered]


def test_memory_that_the_driver_does_not_pin_stays_registered_nowhere(entries, monkeypatch):
    whole = SimpleEntry.__call__

    def second_fails(entry, *arguments):
        code = whole(entry, *arguments)
        return 2 if entry._name == "cuMemHostRegister_v2" and len(entries.named(entry._name)) == 2 else code

    monkeypatch.setattr(SimpleEntry, "__call__", second_fails)
    array = np.frombuffer(mmap.mmap(-1, 20_480), np.uint8)
    with pytest.raises(DriverError, match="cuMemHostRegister returned"):
        pinning.register([array], pages_of(array), 0)
    first = entries.named("cuMemHostRegister_v2")[0][0]
    assert entries.named("cuMemHostUnregister") == [(first,)]
