"""A process that submits, and ends without closing its executor. At its end it says whether the bytes have arrived."""

from __future__ import annotations

import atexit
import sys


def main(kind: str, path: str, route: str) -> None:
    """Submit, and return."""

    def arrived() -> None:
        pair.check()
        sys.stdout.write("arrived\n")

    atexit.register(arrived)  # first, so that it runs last
    from tests.contract.gpu import machines
    from tests.contract.gpu.caches import Ids, way

    gpu = getattr(machines, kind)()
    gpu.__enter__()
    pair, stream = way(gpu, route), gpu.stream()
    executor, fresh = gpu.executor(path), pair.fresh(1)
    pair.renew(stream, fresh)
    first = executor.submit(pair.plan(), after=stream)
    executor.submit(pair.plan(Ids([5], [5])), after=first, priority="high", by_layer=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
