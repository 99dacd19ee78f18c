"""``kvplan calibrate``: measure this GPU, so that ``auto`` chooses paths by its profile."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvplan.base.numbers import exact, rate
from kvplan.cli.arguments.values import gpu
from kvplan.cli.screen.documents import print_json
from kvplan.cli.screen.printing import fact_table, note, number_table, progress, show
from kvplan.cost.profile import TERMS, DeviceProfile, route_paths
from kvplan.errors import KVPlanError

EXAMPLES = """examples:
  kvplan calibrate
  kvplan calibrate --device cuda:1 --output my-gpu.json
  KVPLAN_PROFILE=my-gpu.json python serve.py"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = EXAMPLES
    parser.add_argument("--device", type=gpu, default="cuda:0", metavar="cuda:N", help="the GPU (default cuda:0)")
    parser.add_argument("--output", type=Path, metavar="FILE",
                        help="file of the profile (default: in the user's cache folder)")  # fmt: skip
    parser.add_argument("--alone", action="store_true",
                        help="do not average with earlier calibrations of this kind of GPU")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object (schema kvplan.calibrate)")


def run(args: argparse.Namespace) -> int:
    """Measure, save the profile, and print it."""
    from kvplan.cost.blend import weighed
    from kvplan.cost.store import check_writable, find, path_of, save
    from kvplan.cuda.machine import machine

    here = machine(int(args.device.removeprefix("cuda:")))
    path = args.output or path_of(here)
    check_writable(path)  # before 20 seconds of measuring
    start = time.perf_counter()
    profile = _measured(here, args.device, start, quiet=args.json)
    if not args.alone:
        profile = weighed(profile, find(here))
    taken = time.perf_counter() - start
    save(profile, path)
    if args.json:
        print_json("calibrate", {"path": str(path), "seconds": round(taken, 2), "profile": asdict(profile)})
        return 0
    show(*screen(profile))
    note(f"\nsaved {path} ({exact(path.stat().st_size)}) after {taken:.1f} seconds")
    return 0


def _measured(here: Any, device: str, start: float, *, quiet: bool) -> DeviceProfile:
    try:
        import torch  # noqa: F401  # needed for the buffers, and for the compute that runs at the same time
    except ModuleNotFoundError:
        raise KVPlanError('calibrating needs torch; pip install "kvplan[cuda]"') from None
    from kvplan.measure.calibrate import SECONDS, calibrate

    left = SECONDS - (time.perf_counter() - start)  # torch takes seconds to load from a slow disk
    with progress(silent=quiet) as tell:
        return calibrate(here, device, tell, seconds=left)


def screen(profile: DeviceProfile) -> list[Any]:
    """Return a profile as tables: its GPU, its ceilings, and the costs of each path.

    >>> from kvplan.cost.profile import default
    >>> len(screen(default()))
    3
    """
    ceilings = profile.ceilings
    facts = [
        ("GPU", f"{profile.gpu or 'not known'}, {profile.multiprocessors} SMs"),
        ("driver", f"{profile.driver or 'not known'}, {profile.link}"),
        ("made", f"{profile.how}: {profile.made}"),
        ("load", f"{rate(ceilings['load'])} by the copy engine, {ceilings['sm_load']:.1f} by SMs"),
        ("store", f"{rate(ceilings['store'])} by the copy engine, {ceilings['sm_store']:.1f} by SMs"),
    ]
    if profile.note:
        facts.append(("note", profile.note))
    costs, beside = [], []
    for direction in profile.routes:
        for path in route_paths(direction):
            terms = TERMS[path]
            found = profile.costs[direction][path]
            byte = found.seconds[terms[-1]]
            piece = found.seconds[terms[-2]]
            costs.append((f"{direction}, {path}", f"{found.wall['fixed'] / 1e3:.0f} us", f"{piece:,.0f} ns",
                          f"{1 / byte:.1f}" if byte else "-"))  # fmt: skip
            pair = [profile.beside[kind][direction][path] for kind in ("decode", "prefill")]
            beside.append((f"{direction}, {path}", *(text for one in pair
                           for text in (f"{one.rate:.2f}", f"x{one.slower:.2f}"))))  # fmt: skip
    return [
        fact_table(facts),
        number_table(("", "fixed", "a piece", "GB/s"), costs, right=(1, 2, 3)),
        number_table(("rate; compute", "decode", "", "prefill", ""), beside, right=(1, 2, 3, 4)),
    ]
