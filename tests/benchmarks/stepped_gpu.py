"""A GPU for benchmarks that passes its events one by one."""

from __future__ import annotations

from types import SimpleNamespace


class Steps:
    """A GPU that passes one event each time it is asked for one that is pending."""

    def __init__(self):
        self.marks = self.passed = 0
        self.gpu_work = 0

    def mark(self):
        self.marks += 1
        return SimpleNamespace(query=self._query(self.marks), elapsed_time=lambda later: later.at * 1.0,
                               at=self.marks)  # fmt: skip

    def _query(self, at):
        def query():
            if self.passed >= at:
                return True
            self.passed = min(self.passed + 1, self.marks)
            return False

        return query

    def enqueue(self):
        self.gpu_work += 1

    def drain(self):
        self.passed = self.marks
