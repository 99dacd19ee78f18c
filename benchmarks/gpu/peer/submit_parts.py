"""Show where the time of one block's submit to another process goes.

``python -m benchmarks.gpu.peer.submit_parts [--owner 0] [--turns 300] [--nixl]``: a block of 160 runs of 8 KiB goes to
the pool of another process. Rows: an executor's submit within this process; a submit with the peer, without and
with a note; each at once after the transfer before, and after a rest. Then the parts of a submit, and a profile of it.
Microseconds: of the clock (wall), and of this thread's CPU. ``--owner`` is the other process's GPU; it may be the same.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib
import pstats
import threading
import time
from contextlib import ExitStack
from statistics import median

import torch

from kvplan import Agent, Executor, Policy
from kvplan.cuda.device import Device
from kvplan.measure.flights import Line
from kvplan.measure.processes.pool_layouts import PoolSpec
from kvplan.measure.processes.pool_owner import PoolOwner
from kvplan.measure.processes.process_bench import ProcessBench
from kvplan.measure.processes.process_cases import Remote
from kvplan.measure.workload import Buffers, work

REST = 2e-3
WARM_TURNS = 20
PARTS = (
    "kvplan.agents.peer:Peer._direction",
    "kvplan.agents.settling:Lane.take",
    "kvplan.agents.settling:Lane.watch",
    "kvplan.agents.settling:Lane.leave",
    "kvplan.agents.link:Link.enter",
    "kvplan.agents.channel:Channel.send",
    "kvplan.agents.peer_transfer:PeerTransfer.launch",
    "kvplan.agents.cuda_ipc.cuda_ipc_visitor:OpenedByCudaIpc.before",
    "kvplan.agents.cuda_ipc.cuda_ipc_visitor:OpenedByCudaIpc.after",
    "kvplan.execute.executor:Executor.submit",
    "kvplan.execute.gpu.selection:Selection.choose",
    "kvplan.execute.gpu.kernel_path:KernelPath.prepare",
    "kvplan.execute.gpu.lanes.issuing:Issuing.issue",
    "kvplan.execute.gpu.waits:Awaited.wait",
    "kvplan.cuda.device:Device.launch_recorded",
    "kvplan.cuda.device:Device.play",
    "kvplan.cuda.device:Device.write_behind",
)


class Timed:
    """Adds the microseconds of each call of a function by this thread to a list."""

    def __init__(self, dotted: str) -> None:
        module, _, path = dotted.partition(":")
        owner, name = path.split(".")
        self.name, self.taken = path, list[float]()
        self.owner, self.attribute = getattr(importlib.import_module(module), owner), name
        made, taken, main = getattr(self.owner, name), self.taken, threading.get_ident()
        clock, here = time.perf_counter_ns, threading.get_ident

        def timed(*given, **named):
            if here() != main:
                return made(*given, **named)
            begun = clock()
            try:
                return made(*given, **named)
            finally:
                taken.append((clock() - begun) / 1e3)

        self.made = made
        setattr(self.owner, name, timed)

    def undo(self) -> None:
        """Put the function back."""
        setattr(self.owner, self.attribute, self.made)


def show(name: str, submit, turns: int, *, rest: float = 0.0) -> None:
    """Print medians of a submit and of its end."""
    wall, cpu, end = [], [], []
    for turn in range(turns + WARM_TURNS):
        if rest:
            time.sleep(rest)
        used, begun = time.thread_time_ns(), time.perf_counter_ns()
        transfer = submit()
        submitted, spent = time.perf_counter_ns(), time.thread_time_ns()
        transfer.synchronize()
        if turn >= WARM_TURNS:
            wall.append(submitted - begun)
            cpu.append(spent - used)
            end.append(time.perf_counter_ns() - begun)
    print(f"{name:44} wall {median(wall) / 1e3:7.1f}  cpu {median(cpu) / 1e3:7.1f}  end {median(end) / 1e3:7.1f}",
          f" tenth {sorted(wall)[len(wall) * 9 // 10] / 1e3:7.1f}")  # fmt: skip


def calls(gpu: int) -> None:
    """Print the microseconds of single driver calls."""
    device = Device(gpu)
    with device.current():
        stream, event = device.stream(), device.event()
        line = device.allocate_host(4096)
        cu = device.driver
        made = {
            "cuCtxGetCurrent": device.is_current,
            "cuStreamIsCapturing": lambda: device.capturing(stream),
            "cuEventRecord": lambda: device.record(event, stream),
            "cuEventQuery": lambda: cu.cuEventQuery(event),
            "cuStreamWaitEvent": lambda: device.wait(stream, event),
            "cuStreamWriteValue64": lambda: cu.cuStreamWriteValue64_v2(stream, line, 1, 0),
            "cuStreamWaitValue64": lambda: cu.cuStreamWaitValue64_v2(stream, line, 1, 0),
        }
        for name, call in made.items():
            taken = []
            for _ in range(300):
                begun = time.perf_counter_ns()
                call()
                taken.append(time.perf_counter_ns() - begun)
                if not len(taken) % 50:
                    torch.cuda.synchronize(gpu)
            print(f"    {name:40} {median(taken) / 1e3:7.2f}")


def profiled(profile: cProfile.Profile, turns: int) -> None:
    """Print the 25 functions with the most time of their own, a submit."""
    rows = pstats.Stats(profile).stats
    print("profile, a submit: calls, microseconds of its own, microseconds in all")
    for (path, line, name), (_, calls, own, whole, _) in sorted(rows.items(), key=lambda one: -one[1][2])[:25]:
        where = f"{path.rpartition('kvplan/')[2]}:{line} {name}"
        print(f"    {calls / turns:5.1f} {own / turns * 1e6:7.2f} {whole / turns * 1e6:7.2f}  {where}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--owner", type=int, default=torch.cuda.device_count() - 1)
    parser.add_argument("--turns", type=int, default=300)
    parser.add_argument("--nixl", action="store_true", help="with agents of NIXL and their threads in both processes")
    parser.add_argument("--cpu", action="store_true", help="host memory, by shm: to try this script without a GPU")
    given = parser.parse_args()
    bench = ProcessBench("cpu", "cpu") if given.cpu else ProcessBench("cuda:0", f"cuda:{given.owner}")
    geometry = bench.one_block()
    spec = PoolSpec.of(bench.peer, bench.most_nbytes, [geometry], nixl=given.nixl)._replace(layers=1)
    with ExitStack() as stack:
        other = stack.enter_context(PoolOwner(spec))
        buffers = Buffers(bench.most_nbytes, bench.device, peer=None if given.cpu else bench.peer)
        executor = stack.enter_context(Executor(bench.device, Policy()))
        agent = stack.enter_context(Agent("parts", {}, transports=("cuda_ipc", "shm"), executor=executor))
        peer = agent.meet(other.card)
        remote = Remote(peer, buffers.host, None if given.cpu else Line(bench.device))
        moved = work(buffers, geometry)
        if given.nixl:
            from kvplan.nixl import NixlAgent

            beside = stack.enter_context(NixlAgent("parts", {"cache": moved.src.layout}))
            beside.meet(other.nixl)
        plan = remote.plan(moved, peer.layouts)
        if not given.cpu:
            print("driver calls, microseconds")
            calls(0)
        ways = {
            "executor, one process": lambda: executor.submit(moved.plan),
            "executor, the peer's memory": lambda: executor.submit(plan),
            "peer, no note": lambda: peer.submit(plan),
            "peer, note": lambda: peer.submit(plan, note=b"123"),
            "plan and peer, note": lambda: peer.submit(remote.plan(moved, peer.layouts), note=b"123"),
        }
        other.expect_notes(5 * (given.turns + WARM_TURNS) + given.turns)  # unread notes would become messages
        for name, submit in ways.items():
            show(name, submit, given.turns)
            show(f"{name}, after a rest", submit, given.turns, rest=REST)
        timers = []
        for part in PARTS:
            try:
                timers.append(Timed(part))
            except (AttributeError, ImportError):
                print("   ", part, "is not there")
        show("with timers: peer, note", ways["peer, note"], given.turns)
        for timer in timers:
            timer.undo()
            if timer.taken:
                per = len(timer.taken) / (given.turns + WARM_TURNS)
                print(f"    {timer.name:40} {median(timer.taken):7.2f}  {per:.1f} a submit")
        profile = cProfile.Profile()
        for _ in range(given.turns):
            profile.enable()
            transfer = peer.submit(plan, note=b"123")
            profile.disable()
            transfer.synchronize()
        profiled(profile, given.turns)
        other.arrivals()


if __name__ == "__main__":
    main()
