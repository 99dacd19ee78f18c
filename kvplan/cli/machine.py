"""``kvplan backends``, ``doctor`` and ``calibrate``: what is installed here, what slows it, and what it costs."""

from __future__ import annotations

import argparse
import inspect
import pkgutil
import time
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from kvplan.base.numbers import duration, exact, rate
from kvplan.cli.answer import Answer, Part, Table, table, words
from kvplan.cli.arguments import gpu
from kvplan.cli.screen import Tell, check_file, note, write_file
from kvplan.cost.profile import TERMS, DeviceProfile, route_paths
from kvplan.cost.wire import WireProfile
from kvplan.errors import KVPlanError
from kvplan.measure.doctor import Facts, Finding, examine, gather
from kvplan.measure.wire_calibration import Posted


class Adapter(Part):
    """A module of kvplan.backends.

    Attributes:
        name: of the module.
        summary: the first line of its docstring; null if it cannot be imported.
        signature: of its describe; null if it cannot be imported.
        error: why it cannot be imported; null if it can.
    """

    name: str
    summary: str | None
    signature: str | None
    error: str | None

    def __str__(self) -> str:
        return f"cannot be imported: {self.error}" if self.error else f"{self.summary}\n{self.signature}"


class BackendsAnswer(Answer):
    """The engines whose tensors kvplan can describe.

    Attributes:
        backends: in order of their names.
    """

    schema = "backends/1"
    backends: tuple[Adapter, ...]

    def blocks(self) -> Iterable[Any]:
        """Return a row for each adapter."""
        return [Table([(one.name, str(one)) for one in self.backends] or [("none", "no adapter is installed")])]


def add_backends(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = "examples:\n  kvplan backends\n  kvplan backends --json"


def run_backends(args: argparse.Namespace, tell: Tell) -> BackendsAnswer:
    """Return every adapter; a finding if one cannot be imported."""
    modules = pkgutil.iter_modules(import_module("kvplan.backends").__path__)
    adapters = tuple(adapter(name) for name in sorted(module.name for module in modules) if name[0] != "_")
    return BackendsAnswer(adapters, status=int(any(one.error for one in adapters)))


def adapter(name: str) -> Adapter:
    """Return the summary and signature of one adapter, or the error of its import."""
    try:
        module = import_module(f"kvplan.backends.{name}")
        signature = inspect.signature(module.describe)
    except Exception as error:  # one broken adapter does not hide the others
        return Adapter(name, None, None, f"{type(error).__name__}: {' '.join(str(error).split())}")
    names = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    summary = (module.__doc__ or "").strip().partition("\n")[0]
    return Adapter(name, summary, f"describe{inspect.Signature(names)}", None)


DOCTOR_EXAMPLES = """examples:
  kvplan doctor --device cuda:1
  numactl --cpunodebind=1 --membind=1 kvplan doctor    as an engine would run"""


class DoctorAnswer(Answer):
    """What slows transfers on this machine.

    Attributes:
        device: the GPU.
        healthy: whether there is no problem.
        findings: of each check.
        facts: by which they were judged; null if not known.
    """

    schema = "doctor/3"
    device: str
    healthy: bool
    findings: tuple[Finding, ...]
    facts: Facts

    def blocks(self) -> Iterable[Any]:
        """Return a row for each finding, with its advice below."""
        return [Table([row for one in self.findings for row in (
            (one.state, one.name, one.what), *([("", "", one.advice)] if one.advice else []))])]  # fmt: skip


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = DOCTOR_EXAMPLES
    parser.add_argument("--device", default="cuda:0", type=gpu, help="the GPU to look at (default: cuda:0)")


def run_doctor(args: argparse.Namespace, tell: Tell) -> DoctorAnswer:
    """Examine the machine; a finding if there is a problem."""
    return doctor(args.device, busy=True)


def doctor(device: str = "cuda:0", *, busy: bool) -> DoctorAnswer:
    """Return the findings on this machine; ``busy`` wakes the link of an idle GPU."""
    found = gather(device, busy=busy)
    findings = tuple(examine(found))
    healthy = all(one.state != "problem" for one in findings)
    return DoctorAnswer(found.device, healthy, findings, found, status=int(not healthy))


CALIBRATE_EXAMPLES = """examples:
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
        costs = []
        for route, path in [(way, path) for way in profile.costs for path in route_paths(way)]:
            cost, (*_, piece, byte) = profile.costs[route][path], TERMS[path]
            speed = f"{1 / cost.seconds[byte]:,.1f}" if cost.seconds[byte] else "-"
            both = (profile.beside[kind][route][path] for kind in ("decode", "prefill"))
            beside = (f"{_us(one)} x{one.slower:.2f}" for one in both)
            costs.append((f"{route}, {path}", _us(cost), f"{cost.seconds[piece]:,.0f} ns", speed, *beside))
        yield Table(facts)
        yield Table(costs, ("", "fixed", "a piece", "GB/s", "beside decode", "beside prefill"), range(1, 6))


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


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = CALIBRATE_EXAMPLES
    parser.add_argument("--device", type=gpu, metavar="cuda:N", help="the GPU (default cuda:0)")
    which = parser.add_mutually_exclusive_group()
    peer = "measure copies from the GPU to this peer and back; the GPU makes them"
    which.add_argument("--peer", type=gpu, metavar="cuda:M", help=peer)
    wire = "measure NIXL between two processes: host memory, or that of --device"
    which.add_argument("--wire", action="store_true", help=wire)
    where = "file of the profile (default: in the user's cache folder)"
    parser.add_argument("--output", type=Path, metavar="FILE", help=where)


def run_calibrate(args: argparse.Namespace, tell: Tell) -> CalibrateAnswer | WireAnswer:
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
    from kvplan.cost.wire import wire_name, wire_path
    from kvplan.measure.wire_calibration import calibrate_wire

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
    need_torch("cpu")  # for buffers, and for the compute that runs at the same time
    if not peer:
        return path_of(machines[0]), lambda tell: [calibrate.calibrate(machines[0], device, tell)]
    link = link_between(*ordinals)
    if not link.reachable:
        raise KVPlanError(link.refused)
    here, there = machines
    return path_of(here, there, link), lambda tell: [calibrate.calibrate_pair(
        here, device, peer, tell, peer_name=there.gpu, nvlinks=link.nvlinks)]  # fmt: skip


def need_torch(device: str) -> None:
    """Check that torch is installed and can use the device.

    Raises:
        KVPlanError: torch is missing, or can use no GPU.
    """
    try:
        import torch
    except ModuleNotFoundError:
        raise KVPlanError("measuring needs torch; pip install torch triton") from None
    if device != "cpu" and not torch.cuda.is_available():
        raise KVPlanError(f"torch {torch.__version__} reaches no GPU; install a build with CUDA, or give --device cpu")


def _us(cost: Any) -> str:
    return f"{cost.wall['fixed'] / 1e3:.0f} us"
