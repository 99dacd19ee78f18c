"""The driver's entry points, held against a driver that is none: Python functions stand in for them."""

from __future__ import annotations

import ctypes
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan.cuda import calls
from kvplan.cuda import device as cuda
from kvplan.cuda import driver as driver_entries
from kvplan.cuda.device import Device, Driver, DriverError, Uncaptured
from kvplan.cuda.handles import current_stream
from kvplan.memory import pinning
from tests.profiles import examples
from tests.simulated.entries import Entries, SimpleEntry


@pytest.fixture
def entries(monkeypatch):
    made = Entries()
    monkeypatch.setattr(cuda.ctypes, "CDLL", lambda path: made)
    monkeypatch.setattr(cuda.ctypes, "PyDLL", lambda path: made)
    cuda.driver.cache_clear()
    yield made
    cuda.driver.cache_clear()


@pytest.fixture
def device(entries):
    return Device(1)


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
    with pytest.raises(kvplan.PathError, match=f"no path serves device 'cuda:{ordinal}': kernel: there is no CUDA"):
        kvplan.Executor(device=f"cuda:{ordinal}", policy=kvplan.Policy(path="kernel"))


def test_a_device_without_a_number_is_torch_s_current_one(entries, monkeypatch):
    entries.codes["cuDeviceGetCount"] = 100
    for available, name in ((False, "cuda:0"), (True, "cuda:1")):
        cuda_of_torch = SimpleNamespace(is_available=lambda available=available: available, current_device=lambda: 1)
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda_of_torch))
        with pytest.raises(kvplan.PathError, match=f"no path serves device '{name}': copy_engine: cuDeviceGetCount"):
            kvplan.Executor(device="cuda")


def test_the_current_stream_is_torch_s(monkeypatch):
    def torch(started, **extra):
        stream = SimpleNamespace(cuda_stream=0x51)
        cuda_of_torch = SimpleNamespace(is_initialized=lambda: started, current_stream=lambda ordinal: stream)
        return SimpleNamespace(cuda=cuda_of_torch, _C=SimpleNamespace(**extra))

    for module, handle in (
        (torch(started=False), None),
        (torch(started=True), 0x51),
        (torch(started=True, _cuda_getCurrentRawStream=lambda ordinal: 0x52 + ordinal), 0x53),
    ):
        monkeypatch.setitem(sys.modules, "torch", module)
        assert current_stream(1) == handle


def test_no_driver_and_one_too_old(entries, monkeypatch):
    entries.missing.add("cuMemHostRegister_v2")
    with pytest.raises(kvplan.TransferError, match=r"too old \(12\.0 is the first that serves\): cuMemHostRegister_v2"):
        cuda.driver()

    def absent(path):
        raise OSError(f"{path}: cannot open shared object file")

    monkeypatch.setattr(cuda.ctypes, "CDLL", absent)
    with pytest.raises(kvplan.TransferError, match=r"there is no CUDA driver: libcuda\.so\.1"):
        cuda.driver()


def test_a_driver_that_does_not_start(entries):
    entries.codes["cuInit"] = 999
    with pytest.raises(DriverError, match=r"cuInit returned CUDA_ERROR_PLAYED \(999, it was played\)"):
        cuda.driver()


@pytest.mark.parametrize(("address", "code"), [(None, 0), (0x1000, 500)])
def test_a_driver_without_batches_may_say_so_in_two_ways(entries, address, code):
    entries.gives["cuGetProcAddress_v2"] = [address]
    if code:
        entries.codes["cuGetProcAddress_v2"] = code
    assert Driver("").cuMemcpyBatchAsync is None


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
    "cuLaunchKernelEx": lambda device: device.launch(1, 2, 3, 4, 5, 6),
    "cuMemcpyAsync": lambda device: device.copy(1, 2, 3, 4),
}


@pytest.mark.parametrize("call", FAILING)
def test_a_call_that_fails_is_named_with_its_code(entries, device, call):
    FAILING[call](device)
    entries.codes[call] = 719
    with pytest.raises(DriverError, match=rf"{call.removesuffix('_v2')} returned CUDA_ERROR_PLAYED \(719") as caught:
        FAILING[call](device)
    assert caught.value.code == 719
    assert caught.value.at is None


def test_streams_and_events(entries, device):
    entries.gives |= {"cuStreamCreateWithPriority": [0x51], "cuEventCreate": [0xE1], "cuEventElapsedTime": [2.5]}
    assert device.stream() == device.stream(urgent=True) == 0x51
    assert [arguments[1:] for arguments in entries.named("cuStreamCreateWithPriority")] == [(1, 0), (1, -5)]
    assert device.event() == 0xE1
    device.record(0xE1, 0x51)
    device.wait(0x51, 0xE1)
    assert entries.named("cuEventRecord") == [(0xE1, 0x51)]
    assert entries.named("cuStreamWaitEvent") == [(0x51, 0xE1, 0)]
    assert device.seconds(1, 2) == pytest.approx(0.0025)
    entries.gives["cuStreamIsCapturing"] = [1]
    assert device.capturing(0x51)
    entries.codes["cuStreamIsCapturing"] = 906
    assert not device.capturing(0x51)


def test_memory(entries, device):
    entries.gives |= {"cuMemAlloc_v2": [0xA00], "cuMemHostAlloc": [0xB00], "cuPointerGetAttribute": [7]}
    assert (device.allocate(4096), device.allocate_host(4096)) == (0xA00, 0xB00)
    assert entries.named("cuMemHostAlloc")[0][1:] == (4096, 3)
    device.free(0xA00)
    device.free_host(0xB00)
    assert (entries.named("cuMemFree_v2"), entries.named("cuMemFreeHost")) == ([(0xA00,)], [(0xB00,)])
    assert device.pointer(0x123, cuda.MEMORY_TYPE) == 7
    entries.codes["cuPointerGetAttribute"] = 1
    assert device.pointer(0x123, cuda.MEMORY_TYPE) is None


def test_modules_and_launches(entries, device):
    entries.gives |= {"cuModuleLoadData": [0x11], "cuModuleGetFunction": [0xF1]}
    assert device.load(b"image", "copy_rows", 0) == (0x11, 0xF1)
    assert not entries.named("cuFuncSetAttribute")
    device.load(b"image", "copy_rows", 100 << 10)
    ((function, *rest),) = entries.named("cuFuncSetAttribute")
    assert (function.value, rest) == (0xF1, [8, 100 << 10])
    for argument in (0xABCDEF, 0x123456):
        device.launch(0xF1, 4, 1024, 64, 0x51, argument)
        config, function, pointers, extra = entries.named("cuLaunchKernelEx")[-1]
        grid = (ctypes.c_uint * 7).from_address(config)
        assert list(grid) == [4, 1, 1, 1024, 1, 1, 64]
        assert [word or 0 for word in (ctypes.c_uint64 * 3).from_address(config + 32)] == [0x51, 0, 0]
        assert (function, extra) == (0xF1, None)
        cells = (ctypes.c_void_p * 3).from_address(pointers)
        assert [ctypes.c_uint64.from_address(cell).value for cell in cells] == [argument, 0, 0]


def test_launches_of_many_streams(entries, device):
    for stream in [*range(1, 3 * cuda.MAX_SHAPES), 1]:
        device.launch(0xF1, 4, 1024, 0, stream, 7)
        config = entries.named("cuLaunchKernelEx")[-1][0]
        assert ctypes.c_uint64.from_address(config + 32).value == stream


def test_copies(entries, device):
    device.copy(0xD, 0x5, 64, 0x51)
    assert entries.named("cuMemcpyAsync") == [(0xD, 0x5, 64, 0x51)]
    entries.codes["cuMemcpy2DAsync_v2"] = 1
    assert device.copy_2d(0x99, 0x51) == 1
    assert entries.named("cuMemcpy2DAsync_v2") == [(0x99, 0x51)]


@pytest.mark.parametrize(("code", "failed", "at"), [(0, 0, None), (1, 2, 2), (1, 1 << 40, None)])
def test_a_batch_says_where_it_failed_if_the_driver_does(device, code, failed, at):
    seen = []

    def batch(*arguments):
        seen.append(arguments)
        if code:
            arguments[7]._obj.value = failed
        return code

    device.driver.cuMemcpyBatchAsync = batch
    if code:
        with pytest.raises(DriverError, match="cuMemcpyBatchAsync returned") as caught:
            device.copy_batch(0xD, 0x5, 0x512E, 3, 0x51)
        assert caught.value.at == at
    else:
        device.copy_batch(0xD, 0x5, 0x512E, 3, 0x51)
    ((*heads, attributes, first, number, _, stream),) = seen
    assert (heads, number, stream) == ([0xD, 0x5, 0x512E, 3], 1, 0x51)
    assert ctypes.c_int.from_address(attributes).value == 1  # in the order of the stream
    assert ctypes.c_size_t.from_address(first).value == 0


def test_a_batch_of_a_real_signature_is_called_by_address(entries):
    calls = []
    entry = driver_entries._BATCH(lambda *given: calls.append(given) or 0)
    entries.gives["cuGetProcAddress_v2"] = [ctypes.cast(entry, ctypes.c_void_p).value, 0]
    device = Device(0)
    assert entries.named("cuGetProcAddress_v2")[0][0] == b"cuMemcpyBatchAsync"
    assert entries.named("cuGetProcAddress_v2")[0][2] == 12080
    device.copy_batch(0xD, 0x5, 0x512E, 3, 0x51)
    assert [calls[0][k] for k in (0, 1, 2, 3, 6, 8)] == [0xD, 0x5, 0x512E, 3, 1, 0x51]


@pytest.mark.parametrize("before", [None, 0xC0, 0xEE])
def test_a_device_is_current_within_and_what_was_before_afterwards(entries, device, before):
    entries.gives["cuCtxGetCurrent"] = [before]
    with device.current():
        within = entries.named("cuCtxSetCurrent")
    assert within == ([] if before == 0xC0 else [(0xC0,)])
    assert entries.named("cuCtxSetCurrent")[len(within) :] == ([] if before == 0xC0 else [(before,)])


@pytest.mark.parametrize(("now", "same"), [(None, False), (0xC0, True), (0xEE, False)])
def test_a_device_is_current_if_entering_it_would_set_nothing(entries, device, now, same):
    entries.gives["cuCtxGetCurrent"] = [now]
    assert device.is_current() is same
    assert not entries.named("cuCtxSetCurrent")
    with device.current():
        assert bool(entries.named("cuCtxSetCurrent")) is not same


def test_what_a_capture_forbids_is_allowed_within_and_then_as_before(entries, device):
    modes = []
    device.driver.cuThreadExchangeStreamCaptureMode = lambda cell: (
        modes.append(cell.value), setattr(cell, "value", 0), 0
    )[-1]  # fmt: skip
    with Uncaptured(SimpleNamespace(driver=device.driver)):
        pass
    assert modes == [driver_entries.RELAXED, 0]


def test_pinned_memory_is_registered_in_pieces_and_let_go_of_with_its_array(entries, monkeypatch):
    monkeypatch.setattr(pinning, "MAX_REGISTERED", 8192)
    array, seams = pinning.pinned(20_000, 100, 0)
    start = array.ctypes.data
    assert array.nbytes == 20_000
    assert seams == (start + 8192, start + 16_384)
    registered = [arguments[:2] for arguments in entries.named("cuMemHostRegister_v2")]
    assert registered == [(start, 8192), (start + 8192, 8192), (start + 16_384, 20_000 - 16_384)]
    view = array[10:].reshape(-1, 5)
    del array
    assert not entries.named("cuMemHostUnregister")
    del view
    assert entries.named("cuMemHostUnregister") == [(first,) for first, _ in registered]


def test_memory_that_the_driver_does_not_pin_stays_registered_nowhere(entries, monkeypatch):
    monkeypatch.setattr(pinning, "MAX_REGISTERED", 8192)
    whole = SimpleEntry.__call__

    def second_fails(entry, *arguments):
        code = whole(entry, *arguments)
        return 2 if entry._name == "cuMemHostRegister_v2" and len(entries.named(entry._name)) == 2 else code

    monkeypatch.setattr(SimpleEntry, "__call__", second_fails)
    with pytest.raises(DriverError, match="cuMemHostRegister returned"):
        pinning.pinned(20_000, 100, 0)
    first = entries.named("cuMemHostRegister_v2")[0][0]
    assert entries.named("cuMemHostUnregister") == [(first,)]


@examples(250)
@given(
    moves=st.lists(st.tuples(st.integers(0, 1 << 60), st.integers(0, 1 << 60), st.integers(0, 1 << 40)), max_size=20),
    stream=st.integers(0, 1 << 60),
    failing=st.integers(0, 20),
)
def test_copies_one_by_one_are_the_driver_s_own_calls_until_one_fails(moves, stream, failing):
    seen = []

    def copy(dst, src, nbytes, stream):
        seen.append((dst, src, nbytes, stream))
        return 719 if len(seen) == failing + 1 else 0

    entry = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * 4)(copy)
    dst, src, size = np.array(moves, np.int64).reshape(-1, 3).T.copy()
    at, code = calls.copy_each(ctypes.cast(entry, ctypes.c_void_p).value, dst, src, size, stream)
    issued = [(*move, stream) for move in moves[: failing + 1]]
    assert seen == issued
    assert (at, code) == ((failing, 719) if failing < len(moves) else (len(moves), 0))


def test_a_copy_of_many_that_fails_is_named(device):
    refuses = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * 4)(lambda dst, src, nbytes, stream: 719 * (dst == 7))
    device.driver.cuMemcpyAsync = refuses
    three = np.array([5, 7, 9])
    with pytest.raises(DriverError, match=r"cuMemcpyAsync returned CUDA_ERROR_PLAYED \(719.*: of 3 copies") as caught:
        device.copy_each(three, three, three, 4)
    assert (caught.value.at, caught.value.code) == (1, 719)
    device.copy_each(three[:1], three[:1], three[:1], 4)


ENTRIES = {"cuEventRecord": 2, "cuStreamWaitEvent": 3, "cuLaunchKernelEx": 4, "cuMemcpyAsync": 4,
           "cuMemcpyBatchAsync": 9}  # fmt: skip


def words_at(address, count):
    return np.frombuffer((ctypes.c_int64 * count).from_address(address), np.int64).tolist()


@pytest.fixture
def seen(device):
    """What the driver is called with, past the interpreter; the call that fails, what it returns, its descriptor."""
    seen = SimpleNamespace(calls=[], failing=-1, at=99)

    def entry(name, *given):
        if name == "cuLaunchKernelEx":
            config, function, arguments, extra = given
            (header,) = words_at(words_at(arguments, 1)[0], 1)
            given = function, header, words_at(config, 7), extra
        if name == "cuMemcpyBatchAsync":
            ctypes.c_int64.from_address(given[7]).value = seen.at
            given = [words_at(column, given[3]) for column in given[:3]], given[8]
        seen.calls.append((name, *given))
        return 719 if len(seen.calls) == seen.failing + 1 else 0

    seen.entries = []
    for name, count in ENTRIES.items():
        kind = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * count)
        seen.entries.append(kind(lambda *given, name=name: entry(name, *given)))
        setattr(device.driver, name, seen.entries[-1])
    return seen


ROWS = np.array([[calls.COPY, 1, 0, 80], [calls.BATCH, 2, 4, 81], [calls.RECORD, 5, 0, 77], [calls.WAIT, 6, 0, 78],
                 [calls.LAUNCH, 0x5000, 0, 79]])  # fmt: skip
COLUMNS = np.array([[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]])  # source, destination, bytes


def test_calls_that_are_written_down_are_the_driver_s_own(device, seen):
    device.issue(ROWS, COLUMNS, (0x78, 512, 64), 132)
    config = np.array([132, 1, 1, 512, 1, 1, 64, 0], np.uint32).view(np.int64).tolist()
    assert seen.calls == [
        ("cuMemcpyAsync", 21, 11, 31, 80),
        ("cuMemcpyBatchAsync", [[22, 23], [12, 13], [32, 33]], 81),
        ("cuEventRecord", 5, 77),
        ("cuStreamWaitEvent", 78, 6, 0),
        ("cuLaunchKernelEx", 0x78, 0x5000, [*config, 79, 0, 0], 0),
    ]


@pytest.mark.parametrize(("failing", "name"), [
    (0, "cuMemcpyAsync"), (1, "cuMemcpyBatchAsync"), (2, "cuEventRecord"), (3, "cuStreamWaitEvent"),
    (4, "cuLaunchKernelEx"),
])  # fmt: skip
def test_of_calls_that_are_written_down_the_one_that_fails_is_named_and_the_last(device, seen, failing, name):
    seen.failing = failing
    with pytest.raises(DriverError, match=f"{name} returned CUDA_ERROR_PLAYED") as caught:
        device.issue(ROWS, COLUMNS, (0x78, 512, 64), 132)
    assert (caught.value.call, caught.value.code, caught.value.at) == (name, 719, None)
    assert len(seen.calls) == failing + 1


LAUNCH = {"begin": 5, "end": 6, "kernel": (0x78, 512, 64), "programs": 132, "stream": 79, "argument": 0x5000}


def launches(device, seen, loaded, monkeypatch, failing, **copied):
    """The calls of a recorded launch, and the error."""
    monkeypatch.setattr(cuda.loops, "loaded", loaded)
    monkeypatch.setattr(device, "_cell", threading.local())
    seen.calls.clear()
    seen.failing = failing
    try:
        device.launch_recorded(**LAUNCH, **copied)
    except DriverError as error:
        return list(seen.calls), str(error), error.call, error.code, error.at
    return list(seen.calls), ""


@pytest.mark.parametrize("copied", [{}, {"source": 0x6000, "nbytes": 4096}])
@pytest.mark.parametrize("failing", range(-1, 4))
def test_a_recorded_launch_is_its_calls_one_by_one(device, seen, monkeypatch, copied, failing):
    """Law 8: the compiled call makes the calls that Python makes, up to the one that fails, and raises its error."""
    for name, count in ENTRIES.items():  # Python passes None for a null pointer
        entry = getattr(device.driver, name)
        monkeypatch.setattr(
            device.driver, name, ctypes.cast(entry, ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * count))
        )
    one_by_one = launches(device, seen, None, monkeypatch, failing, **copied)
    at_once = launches(device, seen, calls, monkeypatch, failing, **copied)
    assert at_once == one_by_one
    config = np.array([132, 1, 1, 512, 1, 1, 64, 0], np.uint32).view(np.int64).tolist()
    whole = [
        ("cuEventRecord", 5, 79),
        *([("cuMemcpyAsync", 0x5000, 0x6000, 4096, 79)] if copied else []),
        ("cuLaunchKernelEx", 0x78, 0x5000, [*config, 79, 0, 0], 0),
        ("cuEventRecord", 6, 79),
    ]
    assert at_once[0] == (whole if failing < 0 else whole[: failing + 1])


def test_a_batch_that_fails_names_its_descriptor(device, seen):
    seen.failing, seen.at = 1, 1
    with pytest.raises(DriverError) as caught:
        device.issue(ROWS, COLUMNS, (0x78, 512, 64), 132)
    assert caught.value.at == 3
