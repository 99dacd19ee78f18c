"""Other processes, as tests start, ask, measure and end them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np

from tests.contract.peers.worker import Tensor, Written
from tests.oracle import Cache

ROOT = Path(__file__).parents[3]
PATIENCE = 90.0  # seconds after which a test fails rather than hangs
# As between machines without RDMA. By shared memory, nothing would be in flight when a process is killed. Where there
# is a GPU, NIXL 1.5 makes no agent over wires that cannot reach its memory.
WIRES = "tcp,self,cuda_copy" if Path("/dev/nvidia0").exists() else "tcp,self"
ENVIRONMENT = {"UCX_TLS": WIRES, "NIXL_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "FATAL"}


class Process:
    """Another process; its methods are those of :class:`tests.contract.peers.worker.Worker`.

    Each call waits for the answer, and raises the other process's error. `begin` and `answer` do so in two steps.
    A command `before` the worker's may start it in namespaces of its own.
    """

    def __init__(self, folder: Path, *before: str, **environment: str) -> None:
        self.pipe, theirs = Pipe()
        self.errors = tempfile.TemporaryFile()  # it is read after the end
        self.popen = subprocess.Popen(
            [*before, sys.executable, "-m", "tests.contract.peers.worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()], cwd=ROOT, stdin=subprocess.DEVNULL, stderr=self.errors,
            env=os.environ | ENVIRONMENT | {"TMPDIR": str(folder), "XDG_RUNTIME_DIR": str(folder)} | environment,
        )  # fmt: skip
        theirs.close()
        self.pid = self.popen.pid

    def begin(self, method: str, *args: Any, **options: Any) -> None:
        self.pipe.send((method, args, options))

    def answer(self) -> Any:
        assert self.pipe.poll(PATIENCE), "the other process does not answer"
        try:
            error, value = self.pipe.recv()
        except (EOFError, ConnectionError) as error:
            code = self.popen.wait(PATIENCE)
            raise AssertionError(f"the other process has ended with the exit code {code}: {self.said()}") from error
        if error is not None:
            error.add_note(value)
            raise error
        return value

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)

        def call(*args: Any, **options: Any) -> Any:
            self.begin(method, *args, **options)
            return self.answer()

        return call

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait(PATIENCE)

    def exit(self, within: float, code: int = 0) -> int:
        """Let the interpreter end as usual, without a close(), and return its exit code."""
        if code:
            self.begin("leave", code)
        self.pipe.close()
        return self.popen.wait(within)

    def said(self) -> str:
        """What came on stderr."""
        self.errors.seek(0)
        return self.errors.read().decode(errors="replace")

    def reap(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.wait(PATIENCE)
        self.pipe.close()
        self.errors.close()

    # What the process holds, as the system counts it.

    def holds(self) -> Counter[str]:
        """Count threads, descriptors by kind, and mappings of shared files."""
        proc = Path(f"/proc/{self.pid}")
        held = Counter(threads=len(list((proc / "task").iterdir())))
        for fd in (proc / "fd").iterdir():
            try:
                held["descriptors of " + re.sub(r"[:\d].*", "", str(fd.readlink()))] += 1
            except FileNotFoundError:  # it was closed meanwhile
                continue
        for line in (proc / "maps").read_text().splitlines():
            _, rights, _, _, inode, *path = line.split(maxsplit=5)
            if rights[3] == "s" and inode != "0":
                held["mappings of " + re.sub(r"\d+", "", path[0])] += 1
        return held

    def data_nbytes(self) -> int:
        """Bytes of private memory, rings among them, whether touched or not."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.search(r"VmData:\s+(\d+)", status)[1]) << 10

    def holds_no_more_than(self, before: Counter[str], within: float = 10.0) -> None:
        """Wait until the process holds no more than before: what peers held goes when they have gone."""
        until = time.monotonic() + within
        while not (now := self.holds()) <= before:
            assert time.monotonic() < until, f"more than before: {now - before}"
            time.sleep(0.05)


def shared_files() -> set[Path]:
    return set(Path("/dev/shm").iterdir())


def mapped_by_others(ours: set[int]) -> set[Path]:
    """Files that other processes of the machine map, such as those of tests beside this one."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = [] if int(maps.parent.name) in ours else maps.read_text().splitlines()
        except (OSError, ValueError):  # it has ended
            continue
        found |= {Path(line.split(maxsplit=5)[5]) for line in lines if "/dev/shm/" in line}
    return found


def written(cache: Cache) -> Written:
    """A cache of the oracle as it travels to another process."""
    starts = [root.ctypes.data for root in cache.roots]

    def place(tensor: Any) -> Any:
        if not isinstance(tensor, np.ndarray):
            return tuple(place(each) for each in tensor)
        address = tensor.ctypes.data
        number = next(
            k for k, (start, root) in enumerate(zip(starts, cache.roots, strict=True))
            if start <= address < start + root.nbytes
        )  # fmt: skip
        return Tensor(number, address - starts[number], tensor.shape, tensor.strides, tensor.dtype.str)

    return Written(
        cache.notation, cache.told, cache.head_start, cache.layer_start,
        tuple(root.tobytes() for root in cache.roots), place(cache.tensors),
    )  # fmt: skip
