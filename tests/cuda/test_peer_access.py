"""Access between GPUs: asked for once, enabled in the right context, and refused in words."""

from __future__ import annotations

import threading

import pytest

from kvplan.cuda import device as cuda
from kvplan.cuda.device import ACCESS_FLAGS, Device
from tests.simulated.entries import Entries

CONTEXTS = {10: 0xC0, 11: 0xC1, 12: 0xC2}  # by the driver's handle of the GPU, which is not its ordinal


@pytest.fixture
def entries(monkeypatch):
    """A driver with three GPUs, which reach one another."""
    made = Entries()
    made.gives |= {
        "cuDeviceGetCount": [3],
        "cuDeviceGet": lambda _, ordinal: [10 + ordinal],
        "cuDevicePrimaryCtxRetain": lambda _, number: [CONTEXTS[number]],
        "cuDeviceCanAccessPeer": [1],
    }
    monkeypatch.setattr(cuda.ctypes, "CDLL", lambda path: made)
    monkeypatch.setattr(cuda.ctypes, "PyDLL", lambda path: made)
    cuda.driver.cache_clear()
    yield made
    cuda.driver.cache_clear()


def test_a_peer_is_enabled_once_in_the_context_of_the_gpu(entries):
    device = Device(1)
    begin = len(entries.calls)
    entries.gives["cuCtxGetCurrent"] = [0xE0]
    assert device.enable_peer(2) == ""
    calls = entries.calls[begin:]
    assert [name for name, _ in calls] == [
        "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceCanAccessPeer",
        "cuCtxGetCurrent", "cuCtxSetCurrent", "cuThreadExchangeStreamCaptureMode",
        "cuDeviceGetCount", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxEnablePeerAccess",
        "cuThreadExchangeStreamCaptureMode", "cuCtxSetCurrent",
    ]  # fmt: skip
    assert entries.named("cuDeviceCanAccessPeer")[0][1:] == (11, 12)
    assert entries.named("cuCtxSetCurrent") == [(0xC1,), (0xE0,)]  # this GPU's, then the one before
    assert entries.named("cuCtxEnablePeerAccess") == [(0xC2, 0)]
    begin = len(entries.calls)
    assert device.enable_peer(2) == ""
    assert entries.calls[begin:] == []


def test_each_direction_is_enabled_by_its_own_gpu(entries):
    assert Device(0).enable_peer(1) == Device(1).enable_peer(0) == ""
    assert entries.named("cuCtxEnablePeerAccess") == [(0xC1, 0), (0xC0, 0)]


def test_a_peer_that_torch_has_enabled(entries):
    entries.codes["cuCtxEnablePeerAccess"] = 704
    assert Device(0).enable_peer(1) == ""


def test_its_own_memory_needs_nothing(entries):
    device = Device(1)
    begin = len(entries.calls)
    assert device.enable_peer(1) == ""
    assert entries.calls[begin:] == []


def test_a_pair_that_cannot(entries):
    entries.gives["cuDeviceCanAccessPeer"] = [0]
    device = Device(0)
    why = device.enable_peer(2)
    cannot = "cuda:0 cannot reach the memory of cuda:2: the driver allows no peer access between them. Usual causes"
    assert why.startswith(cannot)
    assert "nvidia-smi topo -p2p r" in why
    assert device.enable_peer(2) == why
    assert len(entries.named("cuDeviceCanAccessPeer")) == 1
    assert len(entries.named("cuDevicePrimaryCtxRetain")) == 1  # no context of the peer is opened


def test_a_pair_that_the_driver_refuses_to_enable(entries):
    entries.codes["cuCtxEnablePeerAccess"] = 217
    device = Device(0)
    why = device.enable_peer(1)
    returned = "cuCtxEnablePeerAccess returned CUDA_ERROR_PLAYED (217, it was played). Usual causes"
    assert why.startswith(f"cuda:0 cannot reach the memory of cuda:1: {returned}")
    assert device.enable_peer(1) == why
    assert len(entries.named("cuCtxEnablePeerAccess")) == 1


def test_more_peers_than_a_gpu_may_have(entries):
    entries.codes["cuCtxEnablePeerAccess"] = 711
    assert Device(0).enable_peer(1).endswith("(711, it was played): without NVSwitch, a GPU has at most 8 peers")


@pytest.mark.parametrize("ordinal", [-1, 3, 99])
def test_a_peer_that_is_not_there(entries, ordinal):
    cannot = f"cuda:0 cannot reach the memory of cuda:{ordinal}"
    assert Device(0).enable_peer(ordinal) == f"{cannot}: there is no CUDA device {ordinal}; 3 are visible"
    assert not entries.named("cuDeviceCanAccessPeer")


@pytest.mark.parametrize(
    "call", ["cuDeviceGetCount", "cuDeviceGet", "cuDeviceCanAccessPeer", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"]
)
def test_a_call_that_fails_is_a_reason_and_may_succeed_later(entries, call):
    device = Device(0)
    entries.codes[call] = 2
    why = device.enable_peer(1)
    assert why.startswith(f"cuda:0 cannot reach the memory of cuda:1: {call} returned CUDA_ERROR_PLAYED (2, ")
    del entries.codes[call]
    assert device.enable_peer(1) == ""


def test_a_capture_mode_is_put_back_when_enabling_fails(entries):
    entries.codes["cuCtxEnablePeerAccess"] = 719
    assert "cuCtxEnablePeerAccess returned CUDA_ERROR_PLAYED (719" in Device(0).enable_peer(1)
    assert len(entries.named("cuThreadExchangeStreamCaptureMode")) == 2
    assert [context for (context,) in entries.named("cuCtxSetCurrent")] == [0xC0, None]


def test_two_threads_enable_one_peer(entries):
    inside = threading.Barrier(2)
    enabled = set()

    def code(context, flags):
        inside.wait(10)
        first = context not in enabled
        enabled.add(context)
        return 0 if first else 704

    entries.codes["cuCtxEnablePeerAccess"] = code
    device, answers = Device(0), []
    threads = [threading.Thread(target=lambda: answers.append(device.enable_peer(1))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == ["", ""]


def test_the_access_of_a_context_is_an_attribute_of_an_address(entries):
    entries.gives["cuPointerGetAttribute"] = [3]
    assert Device(0).pointer(0x1000, ACCESS_FLAGS) == 3
    assert [arguments[1:] for arguments in entries.named("cuPointerGetAttribute")] == [(16, 0x1000)]
