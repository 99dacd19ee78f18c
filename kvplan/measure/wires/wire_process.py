"""``python -m kvplan.measure.wires.wire_process``: a process at the other end of a wire, which answers each note.

It reads a line of JSON from standard input with its device and bytes, and answers with its card of NIXL. The second
line has the card of the process that measures. After that it sends a note back for each note, until its input ends.
"""

from __future__ import annotations

import base64
import json
import sys
import threading
import time
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
    from kvplan.nixl import NixlAgent  # after standard output is free: UCX prints to it

    try:
        memory = Memory(asked["device"], int(asked["nbytes"]))
        agent = NixlAgent(NAME, {"pool": memory.layout}, progress_thread=False)
    except KVPlanError as error:
        answer({"refused": " ".join(str(error).split())})
        return 0
    with agent:
        answer({"card": base64.b64encode(agent.card()).decode(), "address": memory.address})
        line = sys.stdin.readline()
        if line:
            peer = agent.meet(base64.b64decode(json.loads(line)["card"]))
            answer({"met": peer.name})
            _echo(agent, peer.connection.tell)
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
