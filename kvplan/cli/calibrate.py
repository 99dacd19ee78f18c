"""``kvplan calibrate``: measure a GPU, or a GPU and its peer, so that ``auto`` chooses paths by their profiles."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from kvplan.base.numbers import exact, rate
from kvplan.cli.arguments.values import gpu
from kvplan.cli.screen.documents import check_file, print_json, write_file
from kvplan.cli.screen.printing import Tell, fact_table, note, number_table, progress, show
from kvplan.cost.profile import TERMS, DeviceProfile, route_paths
from kvplan.errors import KVPlanError

EXAMPLES = """examples:
  kvplan calibrate
  kvplan calibrate --device cuda:1 --output my-gpu.json
  kvplan calibrate --peer cuda:1
  kvplan calibrate --device cuda:0 --peer cuda:1 --output my-pair.json
  UCX_TLS=tcp kvplan calibrate --wire
  KVPLAN_PROFILE=my-gpu.json:my-pair.json python serve.py"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = EXAMPLES
    parser.add_argument("--device", type=gpu, metavar="cuda:N", help="the GPU (default cuda:0)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--peer", type=gpu, metavar="cuda:M",
                       help="measure copies from the GPU to this peer and back; the GPU makes them")  # fmt: skip
    which.add_argument("--wire", action="store_true",
                       help="measure NIXL between two processes: host memory, or that of --device")  # fmt: skip
    parser.add_argument("--output", type=Path, metavar="FILE",
                        help="file of the profile (default: in the user's cache folder)")  # fmt: skip
    parser.add_argument("--json", action="store_true",
                        help="one JSON object (schema kvplan.calibrate or -wire)")  # fmt: skip


class Subject(NamedTuple):
    """A GPU, or a GPU and its peer, to measure.

    Attributes:
        path: file of its profile.
        measure: function that measures it, of a progress function.
    """

    path: Path
    measure: Callable[[Tell], DeviceProfile]


class Saved(NamedTuple):
    """A profile that was measured and saved, and the seconds that this took."""

    profile: DeviceProfile
    path: Path
    seconds: float

    @property
    def words(self) -> str:
        """Return the line that tells the file."""
        return f"saved {self.path} ({exact(self.path.stat().st_size)}) after {self.seconds:.1f} seconds"

    @property
    def facts(self) -> dict[str, Any]:
        """Return the keys of the JSON document."""
        return {"path": str(self.path), "seconds": round(self.seconds, 2), "profile": asdict(self.profile)}


def run(args: argparse.Namespace) -> int:
    """Measure, save the profile, and print it."""
    if args.wire:
        return _run_wire(args)
    device = args.device or "cuda:0"
    saved = _save(_pair(device, args.peer, args.output) if args.peer else _gpu(device, args.output), args)
    if args.json:
        print_json("calibrate", saved.facts)
        return 0
    show(*screen(saved.profile))
    note(f"\n{saved.words}")
    return 0


def _run_wire(args: argparse.Namespace) -> int:
    """Measure a wire between two processes, save its profile, and print it."""
    from kvplan.cli.answers.wire_rows import wire_screen
    from kvplan.cost.wires.wire_profile import wire_name, wire_path
    from kvplan.measure.wires.wire_calibration import calibrate_wire

    device = args.device or "cpu"
    path = args.output or wire_path(wire_name("UCX"), "DRAM" if device == "cpu" else "VRAM")
    check_file("--output", str(path), folder=True)  # before seconds of measuring
    start = time.perf_counter()
    with progress(silent=args.json) as tell:
        profile, posts = calibrate_wire(device, tell=tell)
    write_file("--output", str(path), profile.to_json().encode())
    seconds = time.perf_counter() - start
    if args.json:
        print_json("calibrate-wire", {"path": str(path), "seconds": round(seconds, 2), "profile": asdict(profile),
                                      "measured": [one._asdict() for one in posts]})  # fmt: skip
        return 0
    show(*wire_screen(profile, posts))
    note(f"\nsaved {path} ({exact(path.stat().st_size)}) after {seconds:.1f} seconds")
    return 0


def _gpu(device: str, output: Path | None) -> Subject:
    from kvplan.cost.store import path_of
    from kvplan.cuda.machine import machine

    here = machine(_ordinal(device))

    def measure(tell: Tell) -> DeviceProfile:
        from kvplan.measure.calibrate import calibrate

        return calibrate(here, device, tell)

    return Subject(output or path_of(here), measure)


def _pair(device: str, peer: str, output: Path | None) -> Subject:
    from kvplan.cost.store import path_of
    from kvplan.cuda.machine import machine
    from kvplan.cuda.peers import link_between

    if peer == device:
        raise KVPlanError(f"--peer is {peer}, the GPU itself; a pair has two GPUs, as in --device cuda:0 --peer cuda:1")
    here, there = machine(_ordinal(device)), machine(_ordinal(peer))
    link = link_between(_ordinal(device), _ordinal(peer))
    if not link.reachable:
        raise KVPlanError(link.refused)

    def measure(tell: Tell) -> DeviceProfile:
        from kvplan.measure.calibrate import calibrate_pair

        return calibrate_pair(here, device, peer, tell, peer_name=there.gpu, nvlinks=link.nvlinks)

    return Subject(output or path_of(here, there, link), measure)


def _ordinal(device: str) -> int:
    return int(device.removeprefix("cuda:"))


def _save(subject: Subject, args: argparse.Namespace) -> Saved:
    """Measure a subject, and save its profile.

    Raises:
        KVPlanError: torch is missing, the file cannot be written, or the measurement failed.
    """
    check_file("--output", str(subject.path), folder=True)  # before 20 seconds of measuring
    start = time.perf_counter()
    try:
        import torch  # noqa: F401  # needed for the buffers, and for the compute that runs at the same time
    except ModuleNotFoundError:
        raise KVPlanError("calibrating needs torch; pip install torch triton") from None
    with progress(silent=args.json) as tell:
        profile = subject.measure(tell)
    write_file("--output", str(subject.path), profile.to_json().encode())
    return Saved(profile, subject.path, time.perf_counter() - start)


def screen(profile: DeviceProfile) -> list[Any]:
    """Return a profile as tables: its GPU, its ceilings, and the costs of each path.

    >>> from kvplan.cost.profile import default, default_pair
    >>> len(screen(default())), len(screen(default_pair()))
    (3, 3)
    """
    ceilings = profile.ceilings
    facts = [
        ("GPU", f"{profile.gpu or 'not known'}, {profile.multiprocessors} SMs"),
        *([("peer", profile.peer)] if profile.peer else []),
        ("driver", f"{profile.driver or 'not known'}, {profile.link}"),
        ("made", f"{profile.how}: {profile.made}"),
        *((route, f"{rate(ceilings[route])} by the copy engine, {ceilings[f'sm_{route}']:.1f} by SMs")
          for route in profile.costs),
    ]  # fmt: skip
    if profile.note:
        facts.append(("note", profile.note))
    costs, beside = [], []
    for route in profile.costs:
        for path in route_paths(route):
            found, terms = profile.costs[route][path], TERMS[path]
            byte = found.seconds[terms[-1]]
            piece = found.seconds[terms[-2]]
            costs.append((f"{route}, {path}", f"{found.wall['fixed'] / 1e3:.0f} us", f"{piece:,.0f} ns",
                          f"{1 / byte:,.1f}" if byte else "-"))  # fmt: skip
            pair = [profile.beside[kind][route][path] for kind in ("decode", "prefill")]
            beside.append((f"{route}, {path}", *(text for one in pair
                           for text in (f"{one.wall['fixed'] / 1e3:.0f} us", f"x{one.slower:.2f}"))))  # fmt: skip
    return [
        fact_table(facts),
        number_table(("", "fixed", "a piece", "GB/s"), costs, right=(1, 2, 3)),
        number_table(("fixed; compute", "decode", "", "prefill", ""), beside, right=(1, 2, 3, 4)),
    ]
