"""Engines in processes of their own, which end in any case, and what they leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.whole_engines.cases import Case

ROOT = Path(__file__).parents[2]
SHM = Path("/dev/shm")
LIMIT_S = 600  # an engine that takes longer hangs; on two cores it takes 20 to 30 s
END_S = 30  # until a process that was told to end is killed
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",  # nothing goes to the network
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),  # vLLM may be there, too
    # One thread an engine. Bound threads that wait for each other are many times slower if a core has other work.
    "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip
WORDS_OF_ERRORS = re.compile(r"Error|Exception|assert|Traceback|failed")


@contextlib.contextmanager
def process(
    command: list[str], folder: Path, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command as the leader of a group of processes, and end the group in any case; its output is a file."""
    environment = {**os.environ, **ENVIRONMENT, **(env or {})}
    with (folder / "log").open("wb") as log:
        started = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True, cwd=folder
        )
    try:
        yield started
    finally:
        if started.poll() is None:  # after an error: let it remove what it has in /dev/shm
            started.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def end_of_log(folder: Path) -> str:
    """The last lines of a process, and those that tell of errors."""
    lines = (folder / "log").read_text(errors="replace").splitlines()
    told = [line for line in lines[:-25] if WORDS_OF_ERRORS.search(line)]
    return "\n".join([*told[-15:], "...", *lines[-25:]])


def run(command: list[str], folder: Path, env: Mapping[str, str] | None = None) -> None:
    """Run a command to its end, which must come in time and be a success."""
    with process(command, folder, env) as started:
        try:
            code = started.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = f"no end after {LIMIT_S} s"
    assert code == 0, f"{command}: {code}\n{end_of_log(folder)}"


def serve(arguments: dict[str, Any], works: list[str], folder: Path, case: Case, likely: int = 0) -> dict[str, Any]:
    """Start an engine, let it serve some works, and return what it says in the end.

    Args:
        arguments: of vLLM's ``LLM``.
        works: keys of :data:`tests.whole_engines.work.WORKS`.
        folder: where the setup, the answer and the log are written.
        case: the rest.
        likely: number of the most likely tokens of each step that are told with the answers.
    """
    setup, answer = folder / "setup.json", folder / "answer.json"
    given = {"arguments": arguments, "works": works, "faults": dict(case.faults), "likely": likely, "ahead": case.ahead}
    setup.write_text(json.dumps(given))
    command = [sys.executable, "-m", "tests.whole_engines.engine", str(setup), str(answer)]
    run(command, folder, case.env)
    return json.loads(answer.read_text())


def shared_names() -> set[str]:
    """The names in /dev/shm."""
    return {path.name for path in SHM.iterdir()}


def left_behind(before: set[str]) -> set[str]:
    """Names in /dev/shm that are new, that stay, and that no living process maps: other processes have their own."""
    end = time.monotonic() + END_S
    while (found := unmapped(before)) and time.monotonic() < end:
        time.sleep(0.5)  # a semaphore of another engine has a name for a moment
    return found


def unmapped(before: set[str]) -> set[str]:
    """Names in /dev/shm that are new, and that no process maps."""
    new, mapped = shared_names() - before, ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mapped += maps.read_text()
    return {name for name in new if f"{SHM}/{name}" not in mapped}
