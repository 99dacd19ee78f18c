"""Drivers that are not there, too old, broken, or without batches."""

from __future__ import annotations

import ctypes

import pytest

import kvplan
from kvplan.cuda import driver as cuda
from kvplan.cuda import use
from kvplan.cuda.driver import Driver
from kvplan.errors import TransferError


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
    with pytest.raises(TransferError, match=r"cuInit returned CUDA_ERROR_PLAYED \(999, it was played\)"), use(entries):
        pass


@pytest.mark.parametrize(("address", "code"), [(None, 0), (0x1000, 500)])
def test_a_driver_without_batches_may_say_so_in_two_ways(entries, address, code):
    entries.gives["cuGetProcAddress_v2"] = [address]
    if code:
        entries.codes["cuGetProcAddress_v2"] = code
    assert Driver(entries, entries).cuMemcpyBatchAsync is None
