"""Captures: work that is written down with what it comes after, to be done at every replay."""

from __future__ import annotations

import random
from collections.abc import Callable


class Graph:
    """What was put on a stream while it was captured, and on those that came to wait for it."""

    def __init__(self, origin: int) -> None:
        self.origin = origin
        self.tails: dict[int, set[int]] = {origin: set()}  # of each stream, the nodes it has come to
        self.events: dict[int, set[int]] = {}
        self.works: list[Callable[[], object]] = []
        self.before: list[set[int]] = []

    def add(self, stream: int, work: Callable[[], object]) -> None:
        self.works.append(work)
        self.before.append(self.tails[stream])
        self.tails[stream] = {len(self.works) - 1}

    def record(self, event: int, stream: int) -> None:
        self.events[event] = set(self.tails[stream])

    def wait(self, stream: int, event: int) -> None:
        assert event in self.events, "a captured stream waits for what is outside its graph"
        self.tails[stream] = self.tails.get(stream, set()) | self.events[event]

    def check_joined(self) -> None:
        """Everything has been waited for by the stream whose capture ends."""
        reached, ahead = set(), set(self.tails[self.origin])
        while ahead:
            node = ahead.pop()
            reached.add(node)
            ahead |= self.before[node] - reached
        assert len(reached) == len(self.works), "a capture ended with work that was not joined"

    def run(self, order: random.Random) -> None:
        """All of it, in some order that the graph allows."""
        done: set[int] = set()
        while len(done) < len(self.works):
            ready = [node for node, before in enumerate(self.before) if node not in done and before <= done]
            node = order.choice(ready)
            self.works[node]()
            done.add(node)
