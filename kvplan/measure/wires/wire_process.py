"""``python -m kvplan.measure.wires.wire_process``: a process at the other end of a wire, which answers each note.

It reads a line of JSON from standard input with its device and bytes, and answers with its metadata of NIXL. The second
line has those of the process that measures. After that it sends a note back for each note, until its input ends.
"""

from __future__ import annotations

import base64
import json
import sys
import threading
import time
from contextlib import closing
from functools import partial
from typing import Any

from kvplan.errors import KVPlanError
from kvplan.measure.processes.answering import answering
from kvplan.measure.wires.wire_memory import Memory

NAME, PING, PONG = "far end", b"ping", b"pong"
REST_SECONDS = 2e-5  # between two looks for notes, so that one core serves both processes
IDLE_SECONDS = 120.0  # after which a process ends that nobody speaks to


def main() -> int:
    """Serve until standard input ends."""
    asked, answer = answering()
    from kvplan.agents.by_nixl.nixl_end import NixlEnd  # after standard output is free: UCX prints to it

    try:
        memory = Memory(asked["device"], int(asked["nbytes"]))
        agent = NixlEnd(NAME, {"pool": memory.layout}, None, ("UCX",), progress_thread=False)
        agent.open()
    except KVPlanError as error:
        answer({"refused": " ".join(str(error).split())})
        return 0
    with closing(agent):
        answer({"metadata": base64.b64encode(agent.metadata() or b"").decode(), "address": memory.address})
        line = sys.stdin.readline()
        if line:
            peer = json.loads(line)
            agent.add(peer["name"], base64.b64decode(peer["metadata"]))
            answer({"met": peer["name"]})
            _echo(agent, partial(agent.tell, peer["name"]))
    return 0


def _echo(agent: Any, tell: Any) -> None:
    over = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=wait, daemon=True).start()
    until = time.monotonic() + IDLE_SECONDS
    while not over.is_set() and time.monotonic() < until:
        for _, note in agent.notes():
            until = time.monotonic() + IDLE_SECONDS
            if note == PING:
                tell(PONG)
        time.sleep(REST_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
