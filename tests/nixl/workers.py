"""What the other process of a transfer does."""

from __future__ import annotations

import os

import numpy as np

from kvplan import KVLayout
from kvplan.nixl import NixlAgent

LAYERS, BLOCKS, NBYTES = 4, 64, 64 << 10  # 16 MiB
NAME = "pool"


def content() -> np.ndarray:
    return (np.arange(BLOCKS * LAYERS * NBYTES) % 251).astype(np.uint8).reshape(BLOCKS, LAYERS, NBYTES)


def serve(transports: str, pipe) -> None:
    """Hold a pool, tell its card, and answer: what notes came, and what the pool holds now."""
    os.environ["UCX_TLS"] = transports
    pool = content()
    with NixlAgent(NAME, {"kv": KVLayout.from_tensors("block layer dim", pool)}) as agent:
        pipe.send(agent.card())
        while (asked := pipe.recv()) is not None:
            pipe.send(agent.notes() if asked == "notes" else pool[asked].copy())
    pipe.send("closed")
