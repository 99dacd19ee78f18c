"""The fixture ``gpu``: every test of this folder runs on the simulated driver, and on a real GPU where there is one."""

from __future__ import annotations

import ctypes
import os
import threading

import pytest

from tests.contract.gpu.caches import ROUTES, way
from tests.contract.gpu.machines import Real, Simulated

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # streams that share a queue of the GPU wait for one another


def no_gpu():
    """Why there is no real GPU, or ""."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no CUDA driver"
    import torch

    return "" if torch.cuda.is_available() else "torch finds no CUDA device"


@pytest.fixture(params=["simulated", pytest.param("real", marks=pytest.mark.gpu)])
def gpu(request):
    """A machine with a GPU. Afterwards its executors are closed, and nothing has gone wrong that nobody saw."""
    if request.param == "real" and (why := no_gpu()):
        pytest.skip(why)
    machine = Real() if request.param == "real" else Simulated()
    with machine:
        yield machine


@pytest.fixture
def two_gpus(gpu):
    """The same, if it has two GPUs."""
    if gpu.count < 2:
        pytest.skip("there is one GPU")
    return gpu


@pytest.fixture
def simulated(gpu):
    """The simulated driver, for tests in which calls of the driver fail."""
    if not isinstance(gpu, Simulated):
        pytest.skip("a real driver does not fail when it is told to")
    return gpu


# What a test may say by `parametrize`, and what most of them begin with.
@pytest.fixture
def path():
    return "auto"


@pytest.fixture
def route():
    return "load"


@pytest.fixture
def executor(gpu, path):
    return gpu.executor(path)


@pytest.fixture
def pair(gpu, route):
    if "cuda:1" in ROUTES[route] and gpu.count < 2:
        pytest.skip("there is one GPU")
    return way(gpu, route)


@pytest.fixture
def stream(gpu):
    return gpu.stream()


@pytest.fixture
def happened():
    """What the CPU waits for."""
    return threading.Event()
