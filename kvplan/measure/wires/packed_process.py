"""``python -m kvplan.measure.wires.packed_process``: a process with an agent, for packed transfers that are timed.

It reads a line of JSON from standard input with its device, its blocks and its ring, and answers with its card. The
second line has the card of the process that measures. Its thread serves transfers until its input ends.
"""

from __future__ import annotations

import base64
import json
import math
import sys

from kvplan.errors import KVPlanError
from kvplan.layout.kvlayout import KVLayout
from kvplan.measure.processes.answering import answering
from kvplan.measure.wires.wire_memory import tensor_of


def main() -> int:
    """Serve until standard input ends."""
    asked, answer = answering()
    from kvplan.agents.agent import Agent  # after standard output is free: UCX prints to it

    shape = int(asked["blocks"]), int(asked["block"])
    try:
        pool = KVLayout.from_tensors("block dim", tensor_of(asked["device"], math.prod(shape)).reshape(shape))
        agent = Agent("far packed end", {"pool": pool}, transports=("nixl",), slots=tuple(asked["slots"]))
        card = agent.card()
    except KVPlanError as error:
        answer({"refused": " ".join(str(error).split())})
        return 0
    with agent:
        answer({"card": base64.b64encode(card).decode()})
        line = sys.stdin.readline()
        if line:
            answer({"met": agent.meet(base64.b64decode(json.loads(line)["card"])).name})
            sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())
