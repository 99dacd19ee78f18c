"""``kvplan report``: put all facts of one layout or of a pair on one page, to attach to an issue."""

from __future__ import annotations

import argparse
import platform
import random
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvplan.base import __version__
from kvplan.base.numbers import exact
from kvplan.cli.answer import Answer, Table
from kvplan.cli.arguments import add_blocks, add_pair, add_shared, pair_of, source_of, span
from kvplan.cli.layouts import LayoutAnswer, which
from kvplan.cli.machine import doctor
from kvplan.cli.pair import ExplainAnswer, explain, times
from kvplan.cli.screen import Tell, check_file, write_file
from kvplan.draw.page import figure, page, table, text
from kvplan.errors import KVPlanError, LayoutError
from kvplan.layout.kvlayout import KVLayout

EXAMPLES = """examples:
  kvplan report examples/specs/gpu_split_kv.toml --output report.html"""


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


def add_report(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = EXAMPLES
    add_pair(parser, ("a", "b"), "?")
    add_shared(parser, "--reinterpret", "--advice")
    parser.add_argument("--output", required=True, metavar="FILE", help="the page")
    add_blocks(parser)
    parser.add_argument("--which", type=span, metavar="BYTES@ADDRESS", help="an address of A to describe")


def run_report(args: argparse.Namespace, tell: Tell) -> ReportAnswer:
    """Write the page; a finding if the pair cannot be compiled, or if a byte did not arrive."""
    check_file("--output", args.output)
    compiles, verified = True, None
    sections: dict[str, str] = {}
    if args.destination is None:
        if args.blocks or args.src or args.dst:
            raise KVPlanError("blocks are for a plan between two layouts; give B as well")
        src = source_of(args)
        sections["Layout"] = _layout(src)
    else:
        src, dst = pair_of(args)
        answer = explain(src, dst, args, tell)
        compiles, verification = answer.compiled is not None, ""
        if compiles:
            tell(None, "verifying")
            verification, verified = _verified(src, dst, reinterpret=args.reinterpret)
        sections["Verdict"] = _html([Table([*_verdict(answer, verified)]), *answer.orders()])
        sections["Layouts"] = f"<h3>A: src</h3>{_layout(src)}<h3>B: dst</h3>{_layout(dst)}"
        sections["Difference"] = _html([answer.sides, Table([*answer.rows()])])
        if answer.compiled is not None:
            program = figure(answer.compiled.diagram(), "the runs of one unit") + text(answer.text or "")
            sections |= {"Program": program, **({"Plan": text(answer.plan.text)} if answer.plan else {}),
                         "Verification": verification}  # fmt: skip
    if args.which is not None:
        nbytes, address = args.which
        sections["Address"] = _html(which([src], address, nbytes).blocks())
    sections["Machine"] = _html(doctor(busy=False).blocks())
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    title = f"kvplan: {_called(args.source)}" + (f" to {_called(args.destination)}" if args.destination else "")
    about = f"kvplan {__version__}, Python {platform.python_version()}, {now}"
    content = page(title, about, sections).encode(errors="backslashreplace")  # a file name need not be UTF-8
    write_file("--output", args.output, content)
    status = int(not compiles or verified is False)
    return ReportAnswer(args.output, len(content), tuple(sections), compiles, verified, status=status)


def _html(blocks: Iterable[Any]) -> str:
    return "".join(table(*block) if isinstance(block, Table) else text(block) for block in blocks)


def _layout(layout: KVLayout) -> str:
    """Return the facts of a layout, its axes and a picture of a block."""
    from kvplan.draw.block import block_picture
    from kvplan.draw.svg import svg

    try:
        picture = figure(svg(block_picture(layout.built)), f"block 0 of {layout.notation}")
    except LayoutError as error:  # too many runs to draw
        picture = text(str(error))
    return _html(LayoutAnswer.read(layout).blocks()) + picture


def _verdict(answer: ExplainAnswer, verified: bool | None) -> Iterator[tuple[str, str]]:
    """Yield the answer in a few rows."""
    if answer.compiled is None:
        yield "compiles", f"no: {answer.refused}"
        return
    yield "runs", f"{times(answer.runs, *answer.run_nbytes)} a unit of {answer.compiled.program.unit_words}"
    arrived = {None: "not tried", True: "every byte arrived, there and back", False: "a byte did NOT arrive"}
    yield "verified", f"{arrived[verified]}: see Verification"
    if answer.plan is not None:
        yield "path", answer.plan.verdict


def _verified(src: KVLayout, dst: KVLayout, *, reinterpret: bool) -> tuple[str, bool | None]:
    """Move markers there and back, between reserved CPU memory with the strides of both."""
    from kvplan.memory.shared_mappings import reserve
    from kvplan.verification.verify import block_counts, verify

    drawn = random.Random(0)  # the same blocks each time
    counts = block_counts(src, dst, None)
    ids = [drawn.sample(range(side.num_blocks), some) for side, some in zip((src, dst), counts, strict=True)]
    try:
        here, there = reserve(src), reserve(dst)
        out = verify(here, there, blocks=(ids[0], ids[1]), reinterpret=reinterpret)
        back = verify(there, here, blocks=(ids[1], ids[0]), reinterpret=reinterpret)
    except LayoutError as error:  # a block is too large, or the system has no addresses left
        return text(f"not tried: {error}"), None
    rows = [("there, by markers in CPU memory", out.text), ("back", back.text)]
    return table(rows), out.ok and back.ok


def _called(source: str) -> str:
    """Return the name of a file without its folders, which are private; return a notation unchanged."""
    return Path(source).name if Path(source).is_file() else source
