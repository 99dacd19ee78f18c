"""Real signals at random moments: `python -m tests.deep.signals [--seed N] [--count N]`.

Each operation of an executor gets so many SIGINTs, to Python's own handler, at random times: from another process by
``os.kill`` and from another thread by ``signal.pthread_kill``, in turns. After each, the executor must run transfers of
both priorities, have nothing in flight, and close; at the end no thread may be left. Then every point of every call on
a simulated GPU is interrupted, with ``--points``.
"""

from __future__ import annotations

import argparse
import gc
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import kvplan
from tests.deep.soak import threads
from tests.execute.interrupted_host import PATIENCE, Host, cancel, result, submit, submit_high
from tests.simulated.interrupted import CALLS, PATHS, interrupted_on_a_gpu, points_on_a_gpu

LONGEST = 1.5  # times what the operation takes: the latest that a signal comes
LEAD = 500e-6  # seconds from the order of a signal to the operation: who sends it must have read that
SWITCH = 1e-5  # seconds that a thread keeps the interpreter: the sending thread must get it in time

Operation = Callable[[Host], Callable[[], object]]


def close(host: Host) -> Callable[[], object]:
    """Close, with transfers in the line."""
    for block in range(3, 6):
        host.submit(block, priority="high" if block == 4 else "normal")
    return host.executor.close


def make(host: Host) -> Callable[[], object]:
    """Make executors, and drop them."""
    del host
    return kvplan.Executor


def ask(host: Host) -> Callable[[], object]:
    """Sums, in which ended transfers are added up."""

    def asks() -> None:
        host.submit(3)
        host.executor.stats()

    return asks


def as_completed(host: Host) -> Callable[[], object]:
    """Take transfers as they end."""

    def takes() -> None:
        left = [host.submit(block, priority="high" if block % 2 else "normal") for block in range(3, 9)]
        while left:
            left = [one for one in left if not one.done()]

    return takes


def many(operation: Operation, times: int = 20) -> Operation:
    """An operation so often that a signal meets it."""

    def repeated(host: Host) -> Callable[[], object]:
        call = operation(host)
        return lambda: [call() for _ in range(times)]

    return repeated


OPERATIONS: dict[str, Operation] = {
    "submit": many(submit), "submit high": many(submit_high), "result": many(result), "cancel": cancel, "close": close,
    "Executor()": many(make, 3), "stats": many(ask), "as completed": many(as_completed, 5),
}  # fmt: skip

SENDER = """
import os, signal, sys, time
for line in sys.stdin:
    while (left := float(line) - time.monotonic()) > 0:
        time.sleep(max(left - 1e-4, 0))
    os.kill(os.getppid(), signal.SIGINT)
"""


class Senders:
    """Who sends a SIGINT to the main thread at a given time of the monotonic clock: a process, or a thread."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", SENDER]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, bufsize=1)
        self._orders: SimpleQueue[float | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._send)
        self._thread.start()

    def order(self, when: float, *, outside: bool) -> None:
        """Have one sent, by the process or by the thread."""
        if outside and self._process.stdin is not None:
            self._process.stdin.write(f"{when!r}\n")
        else:
            self._orders.put(when)

    def close(self) -> None:
        """End both."""
        self._orders.put(None)
        self._thread.join()
        self._process.communicate()

    def _send(self) -> None:
        main = threading.main_thread().ident or 0
        while (when := self._orders.get()) is not None:
            time.sleep(max(when - time.monotonic(), 0))
            signal.pthread_kill(main, signal.SIGINT)


def met(call: Callable[[], object], senders: Senders, delay: float, *, outside: bool) -> bool:
    """Whether a signal that comes after a delay broke a call off; it has come when this returns."""
    ended = False
    begins = time.monotonic() + LEAD
    try:
        senders.order(begins + delay, outside=outside)
        while time.monotonic() < begins:
            pass
        call()
        ended = True
        # Where Python swallows what a handler raises, in a finalizer, nothing else comes.
        time.sleep(max(begins + delay - time.monotonic(), 0) + 1.0)
    except KeyboardInterrupt:
        return not ended
    return True


def interrupt(name: str, count: int, rng: random.Random, senders: Senders) -> int:
    """Send signals until so many have met an operation; how many that were."""
    operation, found = OPERATIONS[name], 0
    host = Host()
    call = operation(host)
    begun = time.perf_counter()
    call()
    taken = max(time.perf_counter() - begun, 2e-5)
    host.gate.set()  # a thread may wait for it, even after a cancel
    host.close()
    for _ in range(20 * count):
        host = Host()
        found += met(operation(host), senders, rng.uniform(0, LONGEST * taken), outside=rng.random() < 0.5)
        host.gate.set()
        if name == "close":
            host.close()
            assert host.executor.stats().in_flight == 0
        else:
            host.check()
        if found >= count:
            break
    return found


def nothing_left() -> None:
    """Threads of executors that were dropped end by themselves."""
    end = time.monotonic() + PATIENCE
    while threads():
        assert time.monotonic() < end, [thread.name for thread in threading.enumerate()]
        gc.collect()
        time.sleep(1e-3)


def main() -> int:
    """Run; 0 where every executor went on."""
    parser = argparse.ArgumentParser(prog="python -m tests.deep.signals", description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--count", type=int, default=300, help="signals that meet each operation")
    parser.add_argument("--points", action="store_true", help="also every point of each call on a simulated GPU")
    told = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if told.seed is None else told.seed
    print(f"seed {seed}", flush=True)
    rng = random.Random(seed)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
    sys.setswitchinterval(SWITCH)
    senders = Senders()
    try:
        for name in OPERATIONS:
            found = interrupt(name, told.count, rng, senders)
            nothing_left()
            print(f"{name}: {found} interrupts, no executor wedged, no thread left", flush=True)
    finally:
        senders.close()
    if told.points:
        for call in CALLS:
            for path in PATHS:
                for warm in (True, False):
                    points = points_on_a_gpu(call, path, warm=warm)
                    for at in range(1, points + 1):
                        interrupted_on_a_gpu(call, path, at, warm=warm)
                    print(f"{call.__name__}, {path}: {points} points", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
