"""Processes that share rounds, and run side by side."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable

from tests.commands import ROOT
from tests.deep.agents.places import Host

START, ROUND = 60.0, 10.0  # seconds: processes that need more are ended, and the run has failed
SUMMARY = re.compile(r"^rounds: .* s, (\d+) transfers done, (\d+) failed, (\d+) noted, nothing wrong", re.MULTILINE)


def side_by_side(workers: int) -> Callable[[Host, int, int], str]:
    """Return a function that lets so many processes share the rounds."""

    def rounds(place: Host, seed: int, count: int) -> str:
        """Start the processes, wait for all, and return the sums."""
        shares = [count // workers + (k < count % workers) for k in range(workers)]
        running = [_begun(place, seed + k, share) for k, share in enumerate(shares) if share]
        ends = [threading.Timer(START + ROUND * max(shares), one.kill) for one in running]
        for timer in ends:
            timer.start()
        told = [one.communicate()[0] for one in running]
        for timer in ends:
            timer.cancel()
        for one, text in zip(running, told, strict=True):
            assert one.returncode == 0, f"a process ended with {one.returncode} after:\n{text[-6000:]}"
        sums = [sum(map(int, column)) for column in zip(*(SUMMARY.findall(text)[0] for text in told), strict=True)]
        return "by {} processes, {} transfers done, {} failed, {} noted".format(len(running), *sums)

    return rounds


def _begun(place: Host, seed: int, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.deep.agents", "--device", place.name, "--seed", str(seed),
               "--rounds", str(count), "--transfers", "0", "--cards", "0"]  # fmt: skip
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
