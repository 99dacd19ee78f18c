"""Cases for a GPU, collected only where there is one; and the executors that they share, one a policy."""

from __future__ import annotations

import ctypes
import os

import pytest

import kvplan

# Streams that share a hardware queue wait for one another; by default there are 8 queues.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def has_gpu() -> bool:
    """Whether torch finds a CUDA device; torch is not even imported where there is no driver."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    import torch

    return torch.cuda.is_available()


collect_ignore_glob = [] if has_gpu() else ["*.py", "paths"]


@pytest.fixture(scope="session")
def executor_of():
    """``executor_of(path="kernel", ...)``: the executor of cuda:0 with that policy."""
    made: dict[tuple, kvplan.Executor] = {}

    def executor(**policy) -> kvplan.Executor:
        key = tuple(sorted(policy.items()))
        if key not in made:
            made[key] = kvplan.Executor(device="cuda:0", policy=kvplan.Policy(**policy))
        return made[key]

    yield executor
    for each in made.values():
        each.close()
