"""``python -m kvplan.measure.child``: the other process of a measurement, which owns memory and answers questions.

It reads a line of JSON for each question from standard input, and answers with a line on standard output. The first
line has its role. It ends with its input.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any

from kvplan.errors import KVPlanError
from kvplan.layout.kvlayout import KVLayout
from kvplan.measure.processes import pools
from kvplan.measure.wire_posts import FAR, PING, PONG, Memory
from kvplan.memory.allocate import allocate

PATIENCE = 60.0  # seconds after which no further note is awaited
REST_SECONDS = 2e-5  # between two looks for notes, so that one core serves both processes
IDLE_SECONDS = 120.0  # after which a process ends that nobody speaks to

Answer = Callable[[Any], None]


def main() -> int:
    """Serve until standard input ends. What libraries print to standard output, as UCX does, goes to its error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(found: Any) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    first = json.loads(sys.stdin.readline())
    role: Callable[..., Callable[[], None]] = pool if first.pop("role") == "pool" else echo
    with ExitStack() as stack:
        try:
            serve = role(stack, answer, **first)
        except KVPlanError as error:
            answer({"refused": " ".join(str(error).split())})
            return 0
        serve()
    return 0


def pool(
    stack: ExitStack, answer: Answer, device: str, nbytes: int, shapes: Sequence[tuple[int, int, str]],
    transports: Sequence[Sequence[str]], slots: Sequence[int] | None,
) -> Callable[[], None]:  # fmt: skip
    """Own a pool, offer it by agents, tell when notes arrive, and meet who asks."""
    import torch

    from kvplan.agents.agent import Agent, NixlAgent

    if device == "cpu":
        like = KVLayout.from_tensors("block dim", torch.empty(1, nbytes, dtype=torch.uint8))
        flat = allocate("block dim", like=like, num_blocks=1, shared=True).tensors[0]
    else:
        flat = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)
    layouts = {name: side.layout for name, side in pools(flat, shapes).items()}
    agents, cards = list[Any](), []
    ring = (slots[0], slots[1]) if slots else None
    for chosen in transports:
        try:
            local = "nixl" not in chosen
            made = Agent("pool", layouts, transports=tuple(chosen)) if local else NixlAgent("pool", layouts, slots=ring)
            agents.append(stack.enter_context(made))
            cards.append((base64.b64encode(made.card()).decode(), ""))
        except (KVPlanError, RuntimeError) as error:
            cards.append(("", " ".join(str(error).split())))

    def serve() -> None:
        answer({"cards": cards})
        for question in map(json.loads, sys.stdin):
            if question["ask"] == "meet":
                answer(agents[0].meet(base64.b64decode(question["card"])).name)
            else:
                answer(list(_arrivals(agents[0], question["count"])))

    return serve


def _arrivals(agent: Any, count: int) -> Iterator[tuple[str, int]]:
    """Yield each note with the time in nanoseconds at which it was seen; all processes of a machine share the clock."""
    until = time.monotonic() + PATIENCE
    while count and time.monotonic() < until:
        for _, note in agent.notes():
            yield note.decode(), time.monotonic_ns()
            count -= 1


def echo(stack: ExitStack, answer: Answer, device: str, nbytes: int) -> Callable[[], None]:
    """Be the far end of a wire, with memory that NIXL registers, which answers each note."""
    from kvplan.agents.by_nixl.nixl_end import NixlEnd

    memory = Memory(device, nbytes)
    end = stack.enter_context(closing(NixlEnd(FAR, {"pool": memory.layout}, None, ("UCX",), progress_thread=False)))
    end.open()

    def serve() -> None:
        answer({"metadata": base64.b64encode(end.metadata()).decode(), "address": memory.address})
        near = json.loads(sys.stdin.readline() or "null")
        if near is None:
            return
        end.add(near["name"], base64.b64decode(near["metadata"]))
        answer(near["name"])
        reader = threading.Thread(target=sys.stdin.read, daemon=True)
        reader.start()
        until = time.monotonic() + IDLE_SECONDS
        while reader.is_alive() and time.monotonic() < until:
            for _, note in end.notes():
                until = time.monotonic() + IDLE_SECONDS
                if note == PING:
                    end.tell(near["name"], PONG)
            time.sleep(REST_SECONDS)

    return serve


if __name__ == "__main__":
    sys.exit(main())
