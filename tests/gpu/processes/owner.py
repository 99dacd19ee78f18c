"""A process that owns memory of a GPU, and does what a test asks of it over a socket.

``python -m tests.gpu.processes.owner DESCRIPTOR DEVICE NBYTES`` has a tensor that torch allocates.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

import torch

from kvplan.cuda.device import Device
from kvplan.cuda.ipc.exports import descriptors, exported
from kvplan.cuda.ipc.shared_words import SharedWords
from kvplan.errors import KVPlanError

SEED = 7


def pattern(nbytes: int, device: str, seed: int = SEED) -> torch.Tensor:
    """Bytes that both processes make alike."""
    made = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return made.to(device)


class Owner:
    """The memory, and an answer to each question."""

    def __init__(self, channel: socket.socket, ordinal: int, nbytes: int) -> None:
        self.channel = channel
        self.device = Device(ordinal)
        self.name = f"cuda:{ordinal}"
        torch.cuda.set_device(ordinal)
        self.whole = torch.zeros(nbytes + 4096, dtype=torch.uint8, device=self.name)
        self.tensor = self.whole[4096:]  # not at the allocation's start
        self.tensor.copy_(pattern(nbytes, self.name))
        torch.cuda.synchronize()
        self.words: SharedWords | None = None

    def export(self) -> dict[str, Any]:
        self.exported = found = exported(self.device, self.tensor.data_ptr(), self.tensor.numel())
        assert len(found.handle) in (0, 64)
        return {"gpu": found.gpu, "address": found.address, "nbytes": found.nbytes, "handle": found.handle.hex(),
                "pieces": found.pieces, "tensor": self.tensor.data_ptr()}  # fmt: skip

    def pieces(self) -> tuple[dict[str, Any], list[int]]:
        return {}, descriptors(self.device, self.exported)

    def holds(self, seed: int) -> bool:
        """Whether the memory has the bytes of a seed."""
        torch.cuda.synchronize()
        return bool(torch.equal(self.tensor, pattern(self.tensor.numel(), self.name, seed)))

    def write_late(self, seed: int, index: int, value: int) -> None:
        """Write other bytes by a stream that is busy for a while, and a word behind them; return at once."""
        assert self.words is not None
        new = pattern(self.tensor.numel(), self.name, seed)
        self.words.pin(self.device)
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
        self.tensor.copy_(new)
        with self.device.current():
            self.words.write(self.device, torch.cuda.current_stream().cuda_stream, index, value)

    def wait_and_read(self, seed: int, index: int, value: int) -> bool:
        """Let a stream wait for a word, then compare what it reads."""
        assert self.words is not None
        stream = torch.cuda.Stream()
        self.words.pin(self.device)
        with self.device.current():
            self.words.wait(self.device, stream.cuda_stream, index, value)
        with torch.cuda.stream(stream):
            copy = self.tensor.clone()
        stream.synchronize()
        return bool(torch.equal(copy, pattern(copy.numel(), self.name, seed)))

    def see_word(self, index: int, value: int) -> bool:
        """Poll a word without a call of the driver."""
        assert self.words is not None
        while self.words.load(index) < value:
            pass
        return True

    def serve(self) -> None:
        while True:
            message, received, _, _ = socket.recv_fds(self.channel, 1 << 16, 8)
            if not message:
                return
            name, *arguments = json.loads(message)
            sent: list[int] = []
            if name == "words":
                self.words, answer = SharedWords.opened(received[0]), None
            elif name == "die":
                os._exit(0)
            else:
                try:
                    answer = getattr(self, name)(*arguments)
                except KVPlanError as error:
                    answer = {"error": f"{type(error).__name__}: {error}"}
                if name == "pieces" and isinstance(answer, tuple):
                    answer, sent = answer
            socket.send_fds(self.channel, [json.dumps(answer).encode()], sent)
            for each in sent:
                os.close(each)


if __name__ == "__main__":
    descriptor, ordinal, nbytes = map(int, sys.argv[1:])
    with socket.socket(fileno=descriptor) as channel:
        Owner(channel, ordinal, nbytes).serve()
