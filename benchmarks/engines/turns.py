"""The parent: starts the engines of a batch side by side, and gives them their measures in turn."""

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.engines.columns import columns
from benchmarks.engines.engine import MARK, Setup
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
        share: share of a batch's time, where time is limited.
    """

    name: str
    fill: tuple[str, dict[str, Any]]
    asks: tuple[Ask, ...]
    share: float


def phases(work: Work) -> list[Phase]:
    """Return the phases of a batch, in order."""
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
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        self._process = subprocess.Popen(  # noqa: S603
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
        samples: one dictionary per measure, way and round.
        failed: why a way has no or fewer figures, by "shape: way".
        facts: link rate, seconds of starts and fills, first tokens; by shape.
        budget: seconds for everything, from ``began`` on.
        report: function that is called after every round, to save what is there.
    """

    budget: float
    report: Callable[[Run], None]
    samples: list[Sample] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """Return the seconds that are left."""
        return self.budget - (time.monotonic() - self.began)


def note(text: str) -> None:
    """Tell the reader at the terminal how far the run is."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


class Batch:
    """Engines of one shape that run side by side, or one engine that is alone on the GPU.

    Args:
        run: what the run has found so far.
        shape: key of the model.
        number: number of the batch; only figures of one batch are compared.
        ways: a way for each engine.
        work: sizes.
        device: "cuda" or "cpu".
        graphs: key of the CUDA graphs.
        first_round: number of the first round, if the ways had rounds before.
    """

    def __init__(self, run: Run, shape: str, number: int, ways: Sequence[str], work: Work, device: str,
                 graphs: str, first_round: int = 0) -> None:  # fmt: skip
        self.run, self.shape, self.number, self.work, self.first_round = run, shape, number, work, first_round
        self.facts = run.facts.setdefault(shape, {"started": {}, "filled": {}, "answers": {}})
        began = time.monotonic()
        self.engines = [Engine(Setup(shape, way, work, device, graphs)) for way in ways]
        for engine in self.engines:
            answer = self.checked(engine, engine.hear(START_S))
            if answer:
                self.facts["started"][engine.way] = answer["started"]
                seconds, connector = time.monotonic() - began, answer["connector"] or "no connector"
                note(f"{shape}, {engine.way}: started after {seconds:.0f} s; {connector}")

    def checked(self, engine: Engine, answer: dict[str, Any]) -> dict[str, Any]:
        """Return an answer; note an error, and return an empty dictionary in its place."""
        if "error" not in answer:
            return answer
        key = f"{self.shape}: {engine.way}"
        if key not in self.run.failed:
            self.run.failed[key] = answer["error"]
            note(f"{key}: {answer['error']}")
        return {}

    def alive(self) -> list[Engine]:
        """Return the engines that still answer."""
        return [engine for engine in self.engines if not engine.died]

    def together(self, do: str, arguments: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Ask every engine at the same time, for requests that are not timed; return answers by way."""
        engines = self.alive()
        for engine in engines:
            engine.send(do, arguments)
        answers = {engine.way: self.checked(engine, engine.hear(ANSWER_S)) for engine in engines}
        return {way: answer for way, answer in answers.items() if answer}

    def measure(self, only: Sequence[str], seconds: float) -> None:
        """Take all phases, each for its share of the seconds."""
        wanted = [phase for phase in phases(self.work) if phase.name in only]
        ends = time.monotonic() + seconds
        for place, phase in enumerate(wanted):
            left = ends - time.monotonic()
            self.phase(phase, left * phase.share / sum(later.share for later in wanted[place:]))

    def phase(self, phase: Phase, seconds: float) -> None:
        """Fill the host, warm up, then take rounds until they are done or the seconds are over."""
        ends = time.monotonic() + seconds
        do, arguments = phase.fill
        for way, answer in self.together(do, arguments).items():
            self.facts["filled"][f"{way}: {phase.name}"] = round(answer["seconds"], 2)
        held = phase.asks[0].held
        if held:
            checks = {"held": held, "suffix": self.work.suffix, "hits": self.work.fewer, "first": _APART * _WARM_UP}
            for way, answer in self.together("answers", checks).items():
                self.facts["answers"].setdefault(str(held), {})[way] = answer["answers"]
        if "link" not in self.facts and (engines := self.alive()):
            self.facts["link"] = self.checked(engines[0], engines[0].ask("link", {})).get("rate", 0.0)
        for place, ask in enumerate(phase.asks):  # the first one of a kind is slower
            few = replace(ask, hits=min(ask.hits, 2))
            for engine in self.alive():
                self.checked(engine, engine.ask(ask.measure, few.arguments(engine.way, _WARM_UP + place + 1)))
        note(f"{self.shape}, {phase.name}: ready")
        for number in range(self.work.rounds):
            if number and time.monotonic() > ends:
                self.run.failed[f"{self.shape}: {phase.name}, batch {self.number + 1}"] = (
                    f"cut short after {number} of {self.work.rounds} rounds: the time is over"
                )
                break
            self.round(phase, self.first_round + number)
            self.run.report(self.run)

    def round(self, phase: Phase, number: int) -> None:
        """Take every measure once, by every way in turn; another way is first in every round."""
        began = time.monotonic()
        for place, ask in enumerate(phase.asks):
            for engine in rotated(self.alive(), number):
                if engine.way == NO_OFFLOADING and number >= SLOW_ROUNDS:
                    continue
                answer = self.checked(
                    engine, engine.ask(ask.measure, ask.arguments(engine.way, number * len(phase.asks) + place))
                )
                if answer:
                    of = {"shape": self.shape, "batch": self.number, "round": number, "way": engine.way}
                    of |= {"measure": ask.measure, "held": ask.held, "suffix": ask.suffix}
                    self.run.samples.append(of | columns(ask.measure, answer))
        note(f"{self.shape}, {phase.name}: round {number + 1}, {time.monotonic() - began:.1f} s")

    def close(self) -> None:
        """End all engines."""
        for engine in self.alive():
            engine.stop()


def rotated(engines: Sequence[Engine], number: int) -> Iterator[Engine]:
    """Yield all engines, beginning with another one in every round."""
    for place in range(len(engines)):
        yield engines[(place + number) % len(engines)]
