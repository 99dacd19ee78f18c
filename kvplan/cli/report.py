"""``kvplan report``: put all facts of one layout or of a pair on one page, to attach to an issue."""

from __future__ import annotations

import argparse
import platform
import random
import shlex
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvplan.base.numbers import duration, exact
from kvplan.base.version import __version__
from kvplan.cli.answer import Answer, Table
from kvplan.cli.arguments import add_blocks, add_pair, add_shared, pair_of, source_of, span
from kvplan.cli.doctor import doctor
from kvplan.cli.explain import ExplainAnswer, explain
from kvplan.cli.inspect import LayoutAnswer, times
from kvplan.cli.screen import Tell, check_file, write_file
from kvplan.cli.which import which
from kvplan.draw.page import Section, bars, figure, folded, page, table, text
from kvplan.errors import KVPlanError, LayoutError
from kvplan.layout.kvlayout import KVLayout

EXAMPLES = """examples:
  kvplan report examples/specs/gpu_split_kv.toml --output report.html"""
REPEATED = ("sizes", "src_sizes", "dst_sizes", "dtype", "src_device", "dst_device", "reinterpret", "blocks", "src",
            "dst", "profile", "overlap")  # fmt: skip


class ReportAnswer(Answer):
    """A page about one or two layouts.

    Attributes:
        path: the page.
        nbytes: its bytes.
        sections: their titles.
        compiles: whether the pair can be compiled.
        verified: whether every byte arrived, there and back; null if that was not tried.
    """

    schema = "report/1"
    path: str
    nbytes: int
    sections: tuple[str, ...]
    compiles: bool
    verified: bool | None

    def blocks(self) -> Iterable[Any]:
        """Return one line."""
        return [f"{self.path}: {', '.join(self.sections)}; {exact(self.nbytes)}"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = EXAMPLES
    add_pair(parser, ("a", "b"), "?")
    add_shared(parser, "--reinterpret", "--advice")
    parser.add_argument("--output", required=True, metavar="FILE", help="the page")
    add_blocks(parser)
    parser.add_argument("--which", type=span, metavar="BYTES@ADDRESS", help="an address of A to describe")


def run(args: argparse.Namespace, tell: Tell) -> ReportAnswer:
    """Write the page; a finding if the pair cannot be compiled, or if a byte did not arrive."""
    check_file("--output", args.output)
    compiles, verified = True, None
    if args.destination is None:
        if args.blocks or args.src or args.dst:
            raise KVPlanError("blocks are for a plan between two layouts; give B as well")
        src = source_of(args)
        sections = [Section("Layout", _layout(src))]
    else:
        src, dst = pair_of(args)
        answer = explain(src, dst, args, tell)
        compiles, verification = answer.compiled is not None, Section("Verification", "")
        sides = "".join(f"<h3>{name}</h3>{_layout(side)}" for name, side in (("A: src", src), ("B: dst", dst)))
        sections = [
            Section("Layouts", sides),
            Section("Difference", _html([answer.sides, Table([*answer.rows()]), *answer.orders()])),
        ]
        if answer.compiled is not None:
            tell(None, "verifying")
            verification, verified = _verified(src, dst, reinterpret=args.reinterpret)
            program = figure(answer.compiled.diagram(), "the runs of one unit") + text(answer.text or "")
            plan = [Section("Plan", text(answer.plan.text))] if answer.plan else []
            sections += [Section("Program", program), *plan, verification]
        sections.insert(0, _verdict(answer, verified))
    if args.which is not None:
        nbytes, address = args.which
        sections.append(Section("Address", _html(which([src], address, nbytes).blocks())))
    sections.append(Section("Machine", _html(doctor(busy=False).blocks())))
    commands = "\n".join(_commands(args))
    sections += [Section("Commands", text(commands))] if commands else []
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    title = f"kvplan: {_called(args.source)}" + (f" to {_called(args.destination)}" if args.destination else "")
    about = f"kvplan {__version__}, Python {platform.python_version()}, {now}"
    content = page(title, about, sections).encode(errors="backslashreplace")  # a file name need not be UTF-8
    write_file("--output", args.output, content)
    titles, status = tuple(section.title for section in sections), int(not compiles or verified is False)
    return ReportAnswer(args.output, len(content), titles, compiles, verified, status=status)


def _html(blocks: Iterable[Any]) -> str:
    return "".join(table(one.rows, one.header, right=tuple(one.right)) if isinstance(one, Table) else text(one)
                   for one in blocks)  # fmt: skip


def _layout(layout: KVLayout) -> str:
    """Return the facts of a layout, its axes and a picture of a block."""
    from kvplan.draw.block import block_picture
    from kvplan.draw.svg import block_svg

    facts_table, *axes = LayoutAnswer.read(layout).blocks()
    try:
        picture = figure(block_svg(block_picture(layout.built)), f"block 0 of {layout.notation}")
    except LayoutError as error:  # too many runs to draw
        picture = text(str(error))
    return _html([facts_table]) + folded("axes", _html(axes)) + picture


def _verdict(answer: ExplainAnswer, verified: bool | None) -> Section:
    """Return the answer in a few rows, and bars of the predicted times of paths and of orders."""
    rows: list[tuple[str, str]] = []
    charts: dict[str, list[tuple[str, float]]] = {}
    advice = answer.advice
    if answer.compiled is None:
        rows.append(("compiles", f"no: {answer.refused}"))
    else:
        arrived = {None: "not tried", True: "every byte arrived, there and back", False: "a byte did NOT arrive"}
        rows.append(
            ("runs", f"{times(answer.runs, *answer.run_nbytes)} a unit of {answer.compiled.program.unit_words}")
        )
        rows.append(("verified", f"{arrived[verified]}: see Verification"))
    if answer.plan is not None:
        rows.append(("path", answer.plan.verdict))
        charts["time by path"] = [(one["path"], one["wall"]) for one in answer.plan.candidates if not one["refused"]]
    if advice is not None and advice.orders:
        orders = (one for one in (advice.present, *advice.orders) if one is not None and one.times)
        charts["time by order"] = [(f"{one.rank}: {one.notation}", sum(t.seconds for t in (one.times or {}).values()))
                                   for one in orders]  # fmt: skip
    drawn = (
        f"<h3>{title}</h3>{bars([(*bar, duration(bar[1])) for bar in some])}" for title, some in charts.items() if some
    )
    return Section("Verdict", _html([Table(rows), *answer.orders()]) + "".join(drawn))


def _verified(src: KVLayout, dst: KVLayout, *, reinterpret: bool) -> tuple[Section, bool | None]:
    """Move markers there and back, between reserved CPU memory with the strides of both."""
    from kvplan.memory.reserve import reserve
    from kvplan.verification.verify import block_counts, verify

    drawn = random.Random(0)  # noqa: S311  # the same blocks each time
    counts = block_counts(src, dst, None)
    ids = [drawn.sample(range(side.num_blocks), some) for side, some in zip((src, dst), counts, strict=True)]
    try:
        here, there = reserve(src), reserve(dst)
        out = verify(here, there, blocks=(ids[0], ids[1]), reinterpret=reinterpret)
        back = verify(there, here, blocks=(ids[1], ids[0]), reinterpret=reinterpret)
    except LayoutError as error:  # a block is too large, or the system has no addresses left
        return Section("Verification", text(f"not tried: {error}")), None
    rows = [("there, by markers in CPU memory", out.text), ("back", back.text)]
    return Section("Verification", table(rows)), out.ok and back.ok


def _commands(args: argparse.Namespace) -> Iterator[str]:
    """Return the command that prints the content of the page; folders of files are left out, which are private."""
    sides = [_called(side) for side in (args.source, args.destination) if side is not None]
    words: list[str] = []
    for name in REPEATED:
        value = getattr(args, name)
        if isinstance(value, dict):
            value = ",".join(f"{axis}={size}" for axis, size in value.items())
        elif isinstance(value, tuple):
            value = ",".join(f"{some.start}-{some.stop - 1}" if len(some) > 1 else f"{some.start}" for some in value)
        if value:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [value])]
    if len(sides) == 2 or not words:
        yield shlex.join(["kvplan", "explain" if len(sides) == 2 else "inspect", *sides, *words])


def _called(source: str) -> str:
    """Return the name of a file without its folders, which are private; return a notation unchanged."""
    return Path(source).name if Path(source).is_file() else source
