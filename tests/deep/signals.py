"""Real signals at random moments: `python -m tests.deep.signals [--seed N] [--count N]`.

Each operation of an executor gets so many SIGINTs from outside Python, after random times; after each, the executor
must run transfers of both priorities, have nothing in flight, and close. Then every point of every call on a simulated
GPU is interrupted, with ``--points``.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from collections.abc import Callable

from tests.test_interrupts import Host, cancel, result, submit, submit_high
from tests.test_simulated_interrupts import CALLS, PATHS, interrupted_on_a_gpu, points_on_a_gpu

LONGEST = 2.0  # times what the operation takes: the latest that a signal comes


def close(host: Host) -> Callable[[], object]:
    """Close, with transfers in the line."""
    for block in range(3, 6):
        host.submit(block, priority="high" if block == 4 else "normal")
    return host.executor.close


def many(operation: Callable[[Host], Callable[[], object]]) -> Callable[[Host], Callable[[], object]]:
    """An operation so often that a timer meets it."""

    def repeated(host: Host) -> Callable[[], object]:
        call = operation(host)
        return lambda: [call() for _ in range(20)]

    return repeated


OPERATIONS: dict[str, Callable[[Host], Callable[[], object]]] = {
    "submit": many(submit), "submit high": many(submit_high), "result": many(result), "cancel": cancel, "close": close,
}  # fmt: skip


ARMED: list[str] = []  # the operation that a signal may break off; a late one, of another thread's, does nothing


def handle(*_: object) -> None:
    """What Python's own handler of SIGINT does, once."""
    if ARMED:
        ARMED.clear()
        raise KeyboardInterrupt


def interrupt(name: str, count: int, rng: random.Random) -> int:
    """Send signals until so many have met an operation; how many that were."""
    met = 0
    operation = OPERATIONS[name]
    host = Host()
    call = operation(host)
    begun = time.perf_counter()
    call()
    taken = max(time.perf_counter() - begun, 2e-5)
    host.close()
    for _ in range(20 * count):
        host = Host()
        call = operation(host)
        try:
            ARMED.append(name)
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, LONGEST * taken))
            call()
            ARMED.clear()
        except KeyboardInterrupt:
            met += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if name == "close":
            host.gate.set()
            host.close()
            assert host.executor.stats().in_flight == 0
        else:
            host.check()
        if met >= count:
            break
    return met


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
    signal.signal(signal.SIGALRM, handle)
    for name in OPERATIONS:
        print(f"{name}: {interrupt(name, told.count, rng)} interrupts, no executor wedged", flush=True)
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
