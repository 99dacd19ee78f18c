"""``python -m kvplan.measure.processes.pool_process``: a process that owns a pool, and answers questions about it.

It reads a line of JSON for each question from standard input, and answers with a line on standard output. The first
line is a :class:`~kvplan.measure.processes.pool_layouts.PoolSpec`; the answer has its cards.
"""

from __future__ import annotations

import base64
import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from kvplan.layout.kvlayout import KVLayout
from kvplan.measure.processes.answering import answering
from kvplan.measure.processes.pool_layouts import LAYERS_NAME, PoolSpec, pool_layouts
from kvplan.memory.allocate import allocate

NAME = "pool"
PATIENCE = 60.0  # seconds after which no further note is awaited


def main() -> int:
    """Serve until standard input ends."""
    import torch

    asked, answer = answering()
    spec = PoolSpec(**asked)
    spec = spec._replace(shapes=tuple((int(size), int(runs), str(host)) for size, runs, host in spec.shapes))

    def bytes_of(nbytes: int) -> Any:
        if spec.device != "cpu":
            return torch.zeros(nbytes, dtype=torch.uint8, device=spec.device)
        like = KVLayout.from_tensors("block dim", torch.empty(1, nbytes, dtype=torch.uint8))
        return allocate("block dim", like=like, num_blocks=1, shared=True).tensors[0]

    from kvplan.agents.agent import Agent  # a room above this one; see .importlinter

    flat, layers = bytes_of(spec.nbytes), [bytes_of(spec.layer_nbytes).view(64, -1) for _ in range(spec.layers)]
    if spec.device != "cpu":
        torch.cuda.synchronize(spec.device)
    layouts = pool_layouts(flat, spec)
    separate = {LAYERS_NAME: KVLayout.from_tensors("layer: block dim", layers)}
    with ExitStack() as stack:
        agent = stack.enter_context(Agent(NAME, layouts, transports=("cuda_ipc", "shm")))
        other = stack.enter_context(Agent("layers", separate, transports=("cuda_ipc", "shm")))
        found = {"card": _text(agent.card()), "layers": _text(other.card()), "nixl": None, "nixl_refused": ""}
        if spec.nixl:
            found |= _nixl(stack, layouts)
        answer(found)
        for question in _questions():
            if question["ask"] == "notes":
                answer(list(_arrivals(agent, question["count"])))
    return 0


def _nixl(stack: ExitStack, layouts: dict[str, KVLayout]) -> dict[str, Any]:
    from kvplan.errors import KVPlanError
    from kvplan.nixl import NixlAgent

    try:
        made = stack.enter_context(NixlAgent(NAME, layouts))
    except (KVPlanError, RuntimeError) as error:
        return {"nixl_refused": " ".join(str(error).split())}
    return {"nixl": _text(made.card())}


def _arrivals(agent: Any, count: int) -> Iterator[tuple[str, int]]:
    """Yield each note with the time in nanoseconds at which it was seen; all processes of a machine share the clock."""
    until = time.monotonic() + PATIENCE
    while count and time.monotonic() < until:
        for _, note in agent.notes():
            yield note.decode(), time.monotonic_ns()
            count -= 1


def _questions() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def _text(card: bytes) -> str:
    return base64.b64encode(card).decode()


if __name__ == "__main__":
    sys.exit(main())
