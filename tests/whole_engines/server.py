"""`vllm serve` in a process of its own, and clients of it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.whole_engines import processes

METRIC = re.compile(r"^(\S+?)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
PAGE = os.sysconf("SC_PAGE_SIZE")
ANSWER_S = 120  # an answer that takes longer is none


class Server:
    """A running server.

    Attributes:
        pid: its process, which leads a session of all of its processes.
    """

    def __init__(self, started: subprocess.Popen[bytes], port: int) -> None:
        self._started, self._port = started, port
        self.pid = started.pid

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_S)

    def get(self, path: str) -> str:
        """Return the text of a page."""
        with contextlib.closing(self.connect()) as connection:
            connection.request("GET", path)
            answer = connection.getresponse()
            text = answer.read().decode()
            if answer.status != http.HTTPStatus.OK:
                raise OSError(f"{path}: {answer.status} {text}")
            return text

    def complete(self, prompt: list[int], count: int, *, chunks: int | None = None) -> list[int]:
        """Return the tokens of an answer; with ``chunks``, hang up after so many pieces of it."""
        asked = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "stream": True,
                 "return_token_ids": True}  # fmt: skip
        found: list[int] = []
        with contextlib.closing(self.connect()) as connection:
            connection.request("POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"})
            if chunks == 0:
                return found
            answer = connection.getresponse()
            if answer.status != http.HTTPStatus.OK:
                raise OSError(f"{answer.status} {answer.read().decode()}")
            pieces = 0
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                (choice,) = json.loads(line.removeprefix(b"data: "))["choices"] or [{}]
                found += choice.get("token_ids") or []
                pieces += 1
                if pieces == chunks:
                    break
        return found

    def metrics(self) -> dict[str, float]:
        """Return vLLM's metrics; series that differ by a label other than the engine's have it in their name."""
        found = {}
        for name, labels, value in METRIC.findall(self.get("/metrics")):
            reason = re.search(r'finished_reason="(\w+)"', labels)
            found[f"{name} {reason[1]}" if reason else name] = float(value)
        return found

    def processes(self) -> list[Path]:
        """Return the folders in /proc of the server and of all processes that it has started."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.pid and fields[0] != "Z":
                    found.append(stat.parent)
        return found

    def resident(self) -> int:
        """Return the bytes of memory of all processes."""
        return sum(int((one / "statm").read_text().split()[1]) * PAGE for one in self.processes())

    def open_files(self) -> int:
        """Return the number of open files of all processes."""
        return sum(len(list((one / "fd").iterdir())) for one in self.processes())

    def stop(self) -> int:
        """End it as a user does, and return its exit code."""
        self._started.send_signal(signal.SIGTERM)
        return self._started.wait(processes.LIMIT_S)


@contextlib.contextmanager
def running(arguments: list[str], folder: Path) -> Iterator[Server]:
    """Start ``vllm`` with arguments, and wait until it serves."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    vllm = str(Path(sys.executable).parent / "vllm")
    with processes.process([vllm, *arguments, "--port", str(port), "--host", "127.0.0.1"], folder) as started:
        server = Server(started, port)
        end = time.monotonic() + processes.LIMIT_S
        while True:
            assert started.poll() is None, f"the server has ended\n{processes.end_of_log(folder)}"
            assert time.monotonic() < end, f"the server does not answer\n{processes.end_of_log(folder)}"
            with contextlib.suppress(OSError):
                server.get("/health")
                break
            time.sleep(0.2)
        yield server
