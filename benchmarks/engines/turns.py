"""The parent: starts one engine after another, and gives each its measures."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.engines.engine import MARK, Setup
from benchmarks.engines.figures import columns
from benchmarks.engines.shapes import Work
from benchmarks.engines.ways import NO_OFFLOADING

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "benchmarks.engines.engine")
START_S, ANSWER_S = 420.0, 150.0  # an engine that is silent for so long is ended
SLOW_ROUNDS, SLOW_HITS = 2, 2  # without offloading every prefix is recomputed: few rounds tell enough
_APART = 100  # numbers of the hits of a measure and a round
_WARM_UP = 900  # a number that no round reaches
_TAIL = 2500  # characters of a dead engine's stderr

Sample = dict[str, Any]


@dataclass(frozen=True)
class Ask:
    """One measure of a round.

    Attributes:
        measure: name of a method of :class:`benchmarks.engines.measures.Measures`.
        held: tokens of the prefix, or 0 for chats.
        suffix: new tokens.
        hits: number of hits, or 0 for chats.
    """

    measure: str
    held: int = 0
    suffix: int = 0
    hits: int = 0

    def arguments(self, way: str, number: int) -> dict[str, int]:
        """Return the arguments of the call; ``number`` is different in every round, and the same for every way."""
        if not self.hits:
            return {"first": number}
        hits = min(self.hits, SLOW_HITS) if way == NO_OFFLOADING else self.hits
        return {"held": self.held, "suffix": self.suffix, "hits": hits, "first": _APART * number}


@dataclass(frozen=True)
class Phase:
    """Measures that share what the host holds.

    Attributes:
        name: "short", "chats" or "long".
        fill: request that makes the host hold it.
        asks: the measures of a round.
        share: share of a visit's time, where time is limited.
    """

    name: str
    fill: tuple[str, dict[str, Any]]
    asks: tuple[Ask, ...]
    share: float


def phases(work: Work) -> list[Phase]:
    """Return the phases of a visit, in order."""
    short, *long = work.held
    alone = [
        Ask("alone", short, suffix, work.hits if suffix == work.suffix else work.fewer) for suffix in work.suffixes
    ]
    both = [Ask("resident", short, work.suffix, 3), Ask("beside", short, work.suffix, work.hits)]
    made = [
        Phase("short", ("fill", {"held": short}), (*alone, *both), 0.55),
        Phase("chats", ("fill_chats", {}), (Ask("chats"),), 0.2),
    ]
    for held in long:
        asks = (Ask("alone", held, work.suffix, work.fewer), Ask("resident", held, work.suffix, 2))
        made.append(Phase("long", ("fill", {"held": held}), asks, 0.25))
    return made


class Engine:
    """The parent's side of one engine."""

    def __init__(self, setup: Setup) -> None:
        self.way = setup.way
        self.died = ""
        self._errors = tempfile.TemporaryFile()  # closed with the process
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        self._process = subprocess.Popen(
            [*COMMAND, json.dumps(asdict(setup))], text=True, cwd=ROOT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # so that its children can be ended, too
        )  # fmt: skip
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                self._lines.put(line[len(MARK) :])
        self._lines.put(None)

    def hear(self, seconds: float) -> dict[str, Any]:
        """Return the next answer; an engine that is dead, or silent for so long, answers ``{"error": why}``."""
        if self.died:
            return {"error": self.died}
        try:
            line = self._lines.get(timeout=seconds)
            why = "the process ended"
        except queue.Empty:
            line, why = None, f"no answer for {seconds:g} s"
        if line is None:
            tail = self._tail()
            self.stop(0)
            self.died = f"{why}; the end of its stderr: {tail}"
            return {"error": self.died}
        return dict(json.loads(line))

    def ask(self, do: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Send a request, and return its answer."""
        self.send(do, arguments)
        return self.hear(ANSWER_S)

    def send(self, do: str, arguments: dict[str, Any]) -> None:
        """Send a request; :meth:`hear` returns its answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, "with": arguments}) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError):
            return  # hear() tells why

    def stop(self, seconds: float = 20.0) -> None:
        """End the process and its children: by the end of its input, and after so many seconds by a signal."""
        process, self.died = self._process, self.died or "it was stopped"
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):  # a dead process reads no more
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        with contextlib.suppress(ProcessLookupError):  # a child of the engine would hold its memory, and its stdout
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._reader.join()
        process.stdout.close()
        self._errors.close()

    def _tail(self) -> str:
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - _TAIL))
        return self._errors.read().decode(errors="replace")


@dataclass
class Run:
    """What a run has found so far.

    Attributes:
        work, device, graphs: see :class:`benchmarks.engines.engine.Setup`.
        phases: names of the phases that are measured.
        report: function that is called after every round, to save what is there.
        samples: one dictionary per measure, way and round.
        failed: why a way has no or fewer figures, by "shape: way".
        facts: by shape, the link's rate, and seconds of starts and fills.
    """

    work: Work
    device: str
    graphs: str
    phases: Sequence[str]
    report: Callable[[], None]
    samples: list[Sample] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)


def note(text: str) -> None:
    """Tell the reader at the terminal how far the run is."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


class Visit:
    """One start of an engine, alone on the GPU, and all its measures.

    Args:
        run: what the run has found so far.
        shape: key of the model.
        way: name of the way.
        first_round: number of the first round, if the way had rounds before.
    """

    def __init__(self, run: Run, shape: str, way: str, first_round: int = 0) -> None:
        self.run, self.shape, self.way, self.first_round = run, shape, way, first_round
        self.facts = run.facts.setdefault(shape, {"started": {}, "filled": {}})
        few = way == NO_OFFLOADING
        self.rounds = min(run.work.rounds, SLOW_ROUNDS) if few else run.work.rounds

    def measure(self, ends: float) -> None:
        """Start the engine, and take all phases, each for its share of the time until ``time.monotonic()`` is over."""
        run, began = self.run, time.monotonic()
        self.engine = Engine(Setup(self.shape, self.way, run.work, run.device, run.graphs))
        try:
            answer = self.checked(self.engine.hear(START_S))
            if answer:
                self.facts["started"][self.way] = answer["started"]
                connector = answer["connector"] or "no connector"
                note(f"{self.shape}, {self.way}: started after {time.monotonic() - began:.0f} s; {connector}")
            wanted = [phase for phase in phases(run.work) if phase.name in run.phases]
            for place, phase in enumerate(wanted):
                if self.engine.died:
                    break
                share = phase.share / sum(later.share for later in wanted[place:])
                self.phase(phase, time.monotonic() + (ends - time.monotonic()) * share)
        finally:
            if not self.engine.died:
                self.engine.stop()

    def checked(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return an answer; note an error, and return an empty dictionary in its place."""
        if "error" not in answer:
            return answer
        key = f"{self.shape}: {self.way}"
        if key not in self.run.failed:
            self.run.failed[key] = answer["error"]
            note(f"{key}: {answer['error']}")
        return {}

    def ask(self, do: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the engine's answer, or an empty dictionary if it has died or failed."""
        return {} if self.engine.died else self.checked(self.engine.ask(do, arguments))

    def phase(self, phase: Phase, ends: float) -> None:
        """Fill the host, warm up, then take rounds until they are done or the time is over."""
        if filled := self.ask(*phase.fill):
            self.facts["filled"][f"{self.way}: {phase.name}"] = round(filled["seconds"], 2)
        if "link" not in self.facts and (link := self.ask("link", {})):
            self.facts["link"] = link["rate"]
        for place, ask in enumerate(phase.asks):  # the first one of a kind is slower
            few = replace(ask, hits=min(ask.hits, 2))
            self.ask(ask.measure, few.arguments(self.way, _WARM_UP + place + 1))
        for number in range(self.rounds):
            if number and time.monotonic() > ends:
                self.run.failed[f"{self.shape}: {phase.name}, {self.way}"] = (
                    f"cut short after {number} of {self.rounds} rounds: the time is over"
                )
                break
            self.round(phase, self.first_round + number)
            self.run.report()

    def round(self, phase: Phase, number: int) -> None:
        """Take every measure once."""
        began = time.monotonic()
        for place, ask in enumerate(phase.asks):
            answer = self.ask(ask.measure, ask.arguments(self.way, number * len(phase.asks) + place))
            if answer:
                of = {"shape": self.shape, "round": number, "way": self.way}
                of |= {"measure": ask.measure, "held": ask.held, "suffix": ask.suffix}
                self.run.samples.append(of | columns(ask.measure, answer))
        note(f"{self.shape}, {self.way}, {phase.name}: round {number + 1}, {time.monotonic() - began:.1f} s")
