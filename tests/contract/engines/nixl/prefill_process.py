"""A process with an agent and a shared pool: it says where the pool is, and answers each line of input with a line.

Its argument is the folder of the notes.
"""

from __future__ import annotations

import base64
import sys
from pathlib import Path

import torch

from kvplan.engines.nixl import Agent
from tests.nixl.double import LoneAgent

BLOCKS, BLOCK = 64, 1024


def pool(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (BLOCKS, BLOCK), dtype=torch.uint8, generator=generator).share_memory_()


def answered(*words):
    sys.stdout.write(" ".join(words) + "\n")
    sys.stdout.flush()


def main():
    agent, memory = Agent(agent=LoneAgent(Path(sys.argv[1]), "prefill")), pool(2)
    storage = memory.untyped_storage()
    registered = agent.register_memory([(storage.data_ptr(), storage.nbytes(), 0, "")], "DRAM")

    def metadata():
        return base64.b64encode(agent.get_agent_metadata()).decode()

    answered(metadata(), str(memory.data_ptr()))
    for line in sys.stdin:
        command = line.strip()
        if command == "notes":
            answer = [note.decode() for notes in agent.get_new_notifs().values() for note in notes]
        elif command == "bytes":
            answer = [base64.b64encode(memory.numpy().tobytes()).decode()]
        elif command == "deregister":
            agent.deregister_memory(registered)
            answer = []
        elif command == "register":
            registered = agent.register_memory([(storage.data_ptr(), storage.nbytes(), 0, "")], "DRAM")
            answer = [metadata()]
        answered(*answer)


if __name__ == "__main__":
    main()
