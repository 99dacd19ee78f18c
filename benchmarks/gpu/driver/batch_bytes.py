"""Check that the driver's batch call moves every byte: ``python -m benchmarks.gpu.driver.batch_bytes``.

No line of kvplan is in this: ctypes and numpy call the driver. A case is a process of its own. It sends the same
descriptors several times, poisons the destination before each, reads it back whole, and compares every byte. Earlier
calls of a process decide where the driver's queue of commands ends: a case that is right here may be wrong elsewhere.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.environment import gpu

Sizes = Callable[[np.random.Generator], NDArray[np.int64]]
NBYTES = 64 << 20
POISON = 0xEE
BATCH_VERSION = 12080
IN_STREAM_ORDER, DURING_THE_CALL, IN_ANY_ORDER = 1, 2, 3
NON_BLOCKING = 1


class Case(NamedTuple):
    """One way to call.

    Attributes:
        sizes: bytes of each descriptor.
        way: ``"load"``, ``"store"`` or ``"within"`` the GPU.
        order: of accesses to the source.
        most: descriptors a call; 0 for a call of cuMemcpyAsync each.
        idle: whether the stream is waited for after every call.
    """

    sizes: Sizes
    way: str = "load"
    order: int = IN_STREAM_ORDER
    most: int = 4096
    idle: bool = False


def equal(nbytes: int, first: int = 0) -> Sizes:
    """Descriptors of one size, the first of another if it is given."""

    def sizes(random: np.random.Generator) -> NDArray[np.int64]:
        del random
        made = np.full(min(NBYTES // nbytes, 16384) - 1, nbytes)
        return np.concatenate(([first or nbytes], made))

    return sizes


def drawn(least: int, most: int, step: int = 1) -> Sizes:
    """Descriptors of random sizes."""
    return lambda random: random.integers(-(-least // step), most // step, min(2 * NBYTES // most, 16384)) * step


CASES = {
    **{f"load, all of {n}": Case(equal(n)) for n in (656, 2048, 8192, 16384, 24576)},
    **{f"load, one of 2,144 then all of {n}": Case(equal(n, 2144)) for n in (656, 2048, 8192, 16384, 24576, 24592)},
    "load, 16 B to 24 KiB, multiples of 16": Case(drawn(16, 24 << 10, 16)),
    "load, 1 B to 24 KiB": Case(drawn(1, 24 << 10)),
    "load, 1 B to 24 KiB, read during the call": Case(drawn(1, 24 << 10), order=DURING_THE_CALL),
    "load, 1 B to 24 KiB, read in any order": Case(drawn(1, 24 << 10), order=IN_ANY_ORDER),
    "load, 1 B to 24 KiB, 256 a call": Case(drawn(1, 24 << 10), most=256),
    "load, 1 B to 24 KiB, 64 a call, idle between": Case(drawn(1, 24 << 10), most=64, idle=True),
    "load, 1 B to 64 KiB": Case(drawn(1, 64 << 10)),
    "load, 28 to 64 KiB": Case(drawn(28 << 10, 64 << 10)),
    "load, 1 B to 24 KiB, a call each": Case(drawn(1, 24 << 10), most=0),
    "load, one of 2,144 then all of 16384, a call each": Case(equal(16384, 2144), most=0),
    "store, one of 2,144 then all of 16384": Case(equal(16384, 2144), way="store"),
    "store, 1 B to 24 KiB": Case(drawn(1, 24 << 10), way="store"),
    "store, 1 B to 64 KiB": Case(drawn(1, 64 << 10), way="store"),
    "within, 1 B to 24 KiB": Case(drawn(1, 24 << 10), way="within"),
}


class Attributes(ctypes.Structure):
    """CUmemcpyAttributes: 24 bytes."""

    _fields_ = (("order", c_int), ("hints", c_int * 4), ("flags", c_uint))


class Driver:
    """The first GPU, one stream, and a buffer on each side; an error of the driver ends the process."""

    def __init__(self, nbytes: int) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        device, context, stream = c_int(), c_void_p(), c_void_p()
        self.call("cuInit", c_uint(0))
        self.call("cuDeviceGet", byref(device), c_int(0))
        self.call("cuDevicePrimaryCtxRetain", byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.call("cuStreamCreate", byref(stream), c_uint(NON_BLOCKING))
        self.stream = stream
        self.host, self.here = self._pinned(nbytes), self._pinned(nbytes)
        self.gpu, self.there = self._on_gpu(nbytes), self._on_gpu(nbytes)
        address, status = c_void_p(), c_int()
        wanted = (b"cuMemcpyBatchAsync", byref(address), c_int(BATCH_VERSION), c_uint64(0), byref(status))
        self.call("cuGetProcAddress_v2", *wanted)
        kind = ctypes.CFUNCTYPE(c_int, *[c_void_p] * 3, c_size_t, *[c_void_p] * 2, c_size_t, *[c_void_p] * 2)
        self._batch = kind(address.value or 0)

    def _pinned(self, nbytes: int) -> NDArray[np.uint8]:
        made = c_void_p()
        self.call("cuMemHostAlloc", byref(made), c_size_t(nbytes), c_uint(0))
        return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(made.value or 0), np.uint8)

    def _on_gpu(self, nbytes: int) -> int:
        made = c_uint64()
        self.call("cuMemAlloc_v2", byref(made), c_size_t(nbytes))
        return made.value

    def call(self, name: str, *arguments: Any) -> None:
        """An entry point by its name."""
        code = getattr(self.library, name)(*arguments)
        if code:
            raise SystemExit(f"{name} returned {code}")

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        """One copy of its own."""
        self.call("cuMemcpyAsync", c_uint64(dst), c_uint64(src), c_size_t(nbytes), self.stream)

    def batch(self, columns: list[NDArray[np.int64]], case: Case) -> None:
        """The batch call over destination, source and bytes."""
        attributes, first, failed = Attributes(order=case.order), c_size_t(0), c_size_t(0)
        dst, src, size = (column.ctypes.data for column in columns)
        count = columns[0].size
        for at in range(0, count, case.most):
            code = self._batch(dst + 8 * at, src + 8 * at, size + 8 * at, min(case.most, count - at),
                               byref(attributes), byref(first), 1, byref(failed), self.stream)  # fmt: skip
            if code:
                raise SystemExit(f"cuMemcpyBatchAsync returned {code}")
            if case.idle:
                self.wait()

    def wait(self) -> None:
        """Wait until all copies are done."""
        self.call("cuStreamSynchronize", self.stream)


def run(case: Case, times: int) -> dict[str, Any]:
    """Send the case's descriptors several times, and count the wrong ones."""
    random = np.random.default_rng(1)
    size = case.sizes(random).astype(np.int64)
    pitch = -(-size // 16) * 16
    nbytes = int(pitch.sum())
    driver = Driver(nbytes)
    driver.host[:] = random.integers(0, POISON, nbytes, dtype=np.uint8)
    source = driver.host.copy()
    from_host, to_host = case.way == "load", case.way == "store"
    begin = np.cumsum(pitch) - pitch
    wrong, examples, of_bytes = [], [], 0
    for _ in range(times):
        order = random.permutation(size.size)
        there = np.empty_like(begin)
        there[order] = np.cumsum(pitch[order]) - pitch[order]
        driver.here[:] = POISON
        driver.copy(driver.there, driver.here.ctypes.data, nbytes)
        driver.copy(driver.gpu, source.ctypes.data, nbytes)
        driver.wait()
        src = begin + (driver.host.ctypes.data if from_host else driver.gpu)
        dst = there + (driver.here.ctypes.data if to_host else driver.there)
        if case.most:
            driver.batch([dst, src, size], case)
        else:
            for a, b, n in zip(dst.tolist(), src.tolist(), size.tolist(), strict=True):
                driver.copy(a, b, n)
        driver.wait()
        if not to_host:
            driver.copy(driver.here.ctypes.data, driver.there, nbytes)
            driver.wait()
        wanted = np.full(nbytes, POISON, np.uint8)
        for a, b, n in zip(there.tolist(), begin.tolist(), size.tolist(), strict=True):
            wanted[a : a + n] = source[b : b + n]
        differs = np.flatnonzero(driver.here != wanted)
        rows = np.sort(there)
        hit = np.unique(np.argsort(there)[np.searchsorted(rows, differs, "right") - 1])
        wrong.append(int(hit.size))
        of_bytes += int(differs.size)
        examples = examples or hit[:12].tolist()
    return {"transfers": times, "wrong": sum(map(bool, wrong)), "descriptors": int(size.size), "most_wrong": max(wrong),
            "bytes": of_bytes, "first": examples}  # fmt: skip


def main(given: Sequence[str] | None = None) -> int:
    """All cases, or one of them in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10, help="transfers a case")
    parser.add_argument("--case", help="only this one, in this process")
    parser.add_argument("--output", type=Path, help="file for the result")
    arguments = parser.parse_args(given)
    if arguments.case:
        print(json.dumps(run(CASES[arguments.case], arguments.times)))
        return 0
    rows = []
    print(f"{'case':52} {'transfers':>9} {'wrong':>6}  of descriptors")
    for name in CASES:
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu.driver.batch_bytes",
            "--case",
            name,
            "--times",
            str(arguments.times),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)  # noqa: S603
        if done.returncode:
            row: dict[str, Any] = {"died": (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]}
            print(f"{name:52} {row['died']}", flush=True)
        else:
            row = json.loads(done.stdout)
            at = f", such as {row['first'][:6]}" if row["first"] else ""
            print(
                f"{name:52} {row['transfers']:9} {row['wrong']:6}  {row['most_wrong']} of {row['descriptors']}{at}",
                flush=True,
            )
        rows.append({"case": name, **row})
    if arguments.output:
        document = {"schema": "kvplan.batch_bytes", "version": 1, "gpu": gpu(), "rows": rows}
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
