"""Two engines in processes of their own, and a request that goes through both."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from subprocess import Popen
from typing import Any

from tests.whole_engines.cases import Case
from tests.whole_engines.processes import end_of_log, process
from tests.whole_engines.work import BLOCK, tokens

REMOTE_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
                  "remote_block_ids": None, "remote_host": None, "remote_port": None}  # fmt: skip
LATE_S = 240  # an answer that takes longer never comes; a test ends after 300 s
LOOK_S = 0.5  # between two looks at a process
TRIES = 12


@dataclass
class Side:
    """One engine of a pair.

    Attributes:
        name: "prefill" or "decode".
        started: its process.
        folder: where its setup and its log are.
        connection: connection to it, when it is ready.
    """

    name: str
    started: Popen[bytes]
    folder: Path
    connection: Connection = field(init=False)

    def accept(self, listener: Listener) -> Connection:
        """Return its connection; its end before that or its silence fails the test, with its log."""
        end = time.monotonic() + LATE_S
        listener._listener._socket.settimeout(LOOK_S)  # type: ignore[attr-defined]
        while self.started.poll() is None and time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                return listener.accept()
        raise AssertionError(f"{self.name}: no connection, exit code {self.started.poll()}\n{end_of_log(self.folder)}")

    def hear(self) -> Any:
        """Return its next answer; its end or its silence fails the test, with its log."""
        try:
            if self.connection.poll(LATE_S):
                return self.connection.recv()
            why = f"no answer for {LATE_S} s"
        except EOFError:
            why = "its process ended"
        raise AssertionError(f"{self.name}: {why}\n{end_of_log(self.folder)}")

    def ask(self, **request: Any) -> dict[str, Any]:
        """Serve one request."""
        self.connection.send(request)
        return dict(self.hear())

    def end(self, held: int = 0) -> dict[str, Any]:
        """Let it end, and return what it says; so many of its blocks stay held."""
        self.connection.send({"held": held})
        return dict(self.hear())

    def log(self) -> str:
        """What it has written."""
        return (self.folder / "log").read_text(errors="replace")


@dataclass
class Pair:
    """An engine that computes prompts, and an engine that decodes them."""

    prefill: Side
    decode: Side

    def meet(self) -> int:
        """Let the engines meet; return how many blocks of the prefill engine stay held by tries in vain.

        vLLM waits 5 seconds for the answer of the other engine, and then computes the prompt. On two cores, which the
        threads of two NIXL agents keep busy, an answer may take longer.
        """
        for tries in range(TRIES):
            if self.through(tokens("a meeting", tries, BLOCK + 1), 1)["failed"] == tries:
                return 2 * tries
        raise AssertionError(f"the engines did not meet\n{end_of_log(self.decode.folder)}")

    def through(self, prompt: list[int], count: int) -> dict[str, Any]:
        """Compute a prompt in one engine, and decode it in the other; return the answer of the other."""
        return self.decode.ask(prompt=prompt, count=count, params=self.computed(prompt))

    def computed(self, prompt: list[int]) -> dict[str, Any]:
        """Compute a prompt, and return the parameters by which another engine takes its KV cache."""
        params = self.prefill.ask(prompt=prompt, count=1, params=REMOTE_PREFILL)["params"]
        return {**params, "do_remote_prefill": True, "do_remote_decode": False}


@contextlib.contextmanager
def pair(model: str, folder: Path, env: Mapping[str, Mapping[str, str]]) -> Iterator[Pair]:
    """Start two engines at the same time, and end them in any case.

    Args:
        model: folder of the model.
        folder: a new folder for both.
        env: environment variables of ``"prefill"`` and of ``"decode"``.
    """
    with contextlib.ExitStack() as stack:
        sides = [stack.enter_context(side(name, model, folder / name, env[name])) for name in ("prefill", "decode")]
        for one in sides:
            assert one.hear() == "ready"
        yield Pair(*sides)


@contextlib.contextmanager
def side(name: str, model: str, folder: Path, env: Mapping[str, str]) -> Iterator[Side]:
    """Start one engine; its log tells more if it does not come up."""
    folder.mkdir(parents=True)
    config = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu",
              "kv_load_failure_policy": "recompute"}  # fmt: skip
    arguments = Case(name).arguments(model, "", "") | {"kv_transfer_config": config}
    address = str(folder / "socket")
    (folder / "setup.json").write_text(json.dumps({"address": address, "arguments": arguments}))
    own = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
           "PYTHONHASHSEED": "0", **env}  # fmt: skip
    command = [sys.executable, "-m", "tests.whole_pairs.paired_engine", str(folder / "setup.json")]
    with Listener(address) as listener, process(command, folder, own) as started:
        made = Side(name, started, folder)
        made.connection = made.accept(listener)
        with made.connection:
            yield made


def free_port() -> int:
    """A port that no process of this machine has now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
