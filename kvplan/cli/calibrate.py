"""``kvplan calibrate``: measure a GPU, a GPU and its peer, or a wire: the profiles by which ``auto`` chooses paths."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kvplan.base.numbers import duration, exact, rate
from kvplan.cli.answer import Answer, Table, table, words
from kvplan.cli.arguments import gpu
from kvplan.cli.screen import Tell, check_file, note, write_file
from kvplan.cost.profile import TERMS, DeviceProfile, route_paths
from kvplan.cost.wires.wire_profile import WireProfile
from kvplan.errors import KVPlanError
from kvplan.measure.wires.wire_posts import Posted

EXAMPLES = """examples:
  kvplan calibrate --device cuda:0 --peer cuda:1 --output my-pair.json
  UCX_TLS=tcp kvplan calibrate --wire"""


class CalibrateAnswer(Answer):
    """The profile of a GPU, or of a GPU and its peer.

    Attributes:
        path: file of the profile.
        seconds: that it took.
        profile: what was measured.
    """

    schema = "calibrate/2"
    path: str
    seconds: float
    profile: DeviceProfile

    def blocks(self) -> Iterable[Any]:
        """Return the GPU with its ceilings, and the costs of each path."""
        profile, ceilings = self.profile, self.profile.ceilings
        facts = [
            ("GPU", f"{profile.gpu or 'not known'}, {profile.multiprocessors} SMs"),
            *([("peer", profile.peer)] if profile.peer else []),
            ("driver", f"{profile.driver or 'not known'}, {profile.link}"),
            ("made", f"{profile.how}: {profile.made}"),
            *((route, f"{rate(ceilings[route])} by the copy engine, {ceilings[f'sm_{route}']:.1f} by SMs")
              for route in profile.costs),
            *([("note", profile.note)] if profile.note else []),
        ]  # fmt: skip
        costs, beside = [], []
        for route, path in [(way, path) for way in profile.costs for path in route_paths(way)]:
            cost, (*_, piece, byte) = profile.costs[route][path], TERMS[path]
            speed = f"{1 / cost.seconds[byte]:,.1f}" if cost.seconds[byte] else "-"
            costs.append((f"{route}, {path}", _us(cost), f"{cost.seconds[piece]:,.0f} ns", speed))
            both = (profile.beside[kind][route][path] for kind in ("decode", "prefill"))
            beside.append((f"{route}, {path}", *(cell for one in both for cell in (_us(one), f"x{one.slower:.2f}"))))
        yield Table(facts)
        yield Table(costs, ("", "fixed", "a piece", "GB/s"), range(1, 4))
        yield Table(beside, ("fixed; compute", "decode", "", "prefill", ""), range(1, 5))


class WireAnswer(Answer):
    """The profile of NIXL between two processes.

    Attributes:
        path: file of the profile.
        seconds: that it took.
        profile: what was measured.
        measured: the lists that were posted.
    """

    schema = "calibrate-wire/2"
    path: str
    seconds: float
    profile: WireProfile
    measured: tuple[Posted, ...]

    def blocks(self) -> Iterable[Any]:
        """Return the costs of the wire, and the lists."""
        costs = {
            name: duration(one) if isinstance(one, float) else words(name, one)
            for name, one in vars(self.profile).items()
        }
        return [Table([*costs.items()]), table(self.measured, "operation, descriptors, each: nbytes, seconds")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = EXAMPLES
    parser.add_argument("--device", type=gpu, metavar="cuda:N", help="the GPU (default cuda:0)")
    which = parser.add_mutually_exclusive_group()
    peer = "measure copies from the GPU to this peer and back; the GPU makes them"
    which.add_argument("--peer", type=gpu, metavar="cuda:M", help=peer)
    wire = "measure NIXL between two processes: host memory, or that of --device"
    which.add_argument("--wire", action="store_true", help=wire)
    where = "file of the profile (default: in the user's cache folder)"
    parser.add_argument("--output", type=Path, metavar="FILE", help=where)


def run(args: argparse.Namespace, tell: Tell) -> CalibrateAnswer | WireAnswer:
    """Measure, and save the profile.

    Raises:
        KVPlanError: torch is missing, the file cannot be written, or the measurement failed.
    """
    path, measure = _wire(args) if args.wire else _gpu(args)
    path = args.output or path
    check_file("--output", str(path), folder=True)  # before seconds of measuring
    start = time.perf_counter()
    profile, *more = measure(tell)
    write_file("--output", str(path), profile.to_json().encode())
    seconds = time.perf_counter() - start
    if not args.json:
        note(f"saved {path} ({exact(path.stat().st_size)}) after {seconds:.1f} seconds")
    answer: Any = WireAnswer if args.wire else CalibrateAnswer
    return answer(str(path), round(seconds, 2), profile, *more)  # type: ignore[no-any-return]


def _wire(args: argparse.Namespace) -> tuple[Path, Callable[[Tell], Any]]:
    """Return the usual file of a wire's profile, and what measures it."""
    from kvplan.cost.wires.wire_profile import wire_name, wire_path
    from kvplan.measure.wires.wire_calibration import calibrate_wire

    device = args.device or "cpu"
    path = wire_path(wire_name("UCX"), "DRAM" if device == "cpu" else "VRAM")
    return path, lambda tell: calibrate_wire(device, tell=tell)


def _gpu(args: argparse.Namespace) -> tuple[Path, Callable[[Tell], Any]]:
    """Return the usual file of a GPU's profile, or of a GPU and its peer, and what measures it."""
    from kvplan.cost.store import path_of
    from kvplan.cuda.machine import machine
    from kvplan.cuda.peers import link_between
    from kvplan.measure import calibrate

    device, peer = args.device or "cuda:0", args.peer
    if peer == device:
        raise KVPlanError(f"--peer is {peer}, the GPU itself; a pair has two GPUs, as in --device cuda:0 --peer cuda:1")
    ordinals = [int(one.removeprefix("cuda:")) for one in (device, *([peer] if peer else []))]
    machines = [machine(ordinal) for ordinal in ordinals]
    if not peer:
        return path_of(machines[0]), lambda tell: [_with_torch(calibrate.calibrate)(*machines, device, tell)]
    link = link_between(*ordinals)
    if not link.reachable:
        raise KVPlanError(link.refused)
    here, there = machines
    return path_of(here, there, link), lambda tell: [_with_torch(calibrate.calibrate_pair)(
        here, device, peer, tell, peer_name=there.gpu, nvlinks=link.nvlinks)]  # fmt: skip


def _with_torch(measure: Callable[..., Any]) -> Callable[..., Any]:
    """Return what measures, if torch is there for the buffers and for the compute that runs at the same time."""
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError:
        raise KVPlanError("calibrating needs torch; pip install torch triton") from None
    return measure


def _us(cost: Any) -> str:
    return f"{cost.wall['fixed'] / 1e3:.0f} us"
