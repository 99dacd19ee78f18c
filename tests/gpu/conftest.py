"""Executors that the GPU tests share, one a policy."""

from __future__ import annotations

import os

import pytest

import kvplan

# Streams that share a hardware queue wait for one another; by default there are 8 queues.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


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
