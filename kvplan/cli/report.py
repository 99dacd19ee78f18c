"""``kvplan report``: put all facts of one layout or of a pair on one page, to attach to an issue."""

from __future__ import annotations

import argparse
import platform
import random
from base64 import b64encode
from collections.abc import Iterable
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from kvplan.base import __version__
from kvplan.base.numbers import exact
from kvplan.cli.arguments import add_blocks, add_pair, add_shared, check_file, layouts_of, span, write_file
from kvplan.cli.layouts import LayoutAnswer, which
from kvplan.cli.machine import doctor
from kvplan.cli.pair import ExplainAnswer, explain, times
from kvplan.cli.screen import Answer, Table, Tell
from kvplan.draw.block import block_picture
from kvplan.draw.svg import svg
from kvplan.errors import KVPlanError, LayoutError
from kvplan.layout.kvlayout import KVLayout
from kvplan.memory.shared_mappings import reserve
from kvplan.verification.verify import block_counts, verify

ARRIVED = {None: "not tried", True: "every byte arrived, there and back", False: "a byte did NOT arrive"}
STYLE = """
:root{color-scheme:light dark;--ink:#1b1b1b;--faint:#5a5a5a;--page:#fff;--rule:#d5d5d5;--sheet:#f6f6f6;--mark:#0058a3}
@media(prefers-color-scheme:dark){:root{--ink:#ececec;--faint:#a8a8a8;--page:#161616;--rule:#3c3c3c;--sheet:#202020;
--mark:#6db8f0}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);margin:2rem auto;max-width:64rem;
padding:0 1rem}
h1{font-size:1.5rem;margin:0 0 .25rem}h2{font-size:1.15rem;margin:2.25rem 0 .5rem;border-bottom:1px solid var(--rule)}
p{color:var(--faint);margin:0 0 1.5rem}nav a{margin-right:1rem;color:var(--mark)}
table{border-collapse:collapse;margin:.5rem 0}td,th{padding:.15rem .9rem .15rem 0;text-align:left;vertical-align:top}
th{color:var(--faint);font-weight:500}td{white-space:pre-wrap}td.number{text-align:right;font-variant-numeric:tabular-nums}
pre{font:13px/1.45 ui-monospace,monospace;background:var(--sheet);padding:.75rem 1rem;overflow-x:auto;border-radius:4px}
figure{margin:.75rem 0;overflow-x:auto}img{width:100%;min-width:48rem;height:auto}
h3{font-size:1rem;margin:1rem 0 .25rem}
@media print{nav{display:none}img{min-width:0}}
""".strip()


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
    parser.epilog = """examples:
  kvplan report examples/specs/gpu_split_kv.toml --output report.html"""
    add_pair(parser, ("a", "b"), "?")
    add_shared(parser, "--reinterpret", "--no-advice")
    parser.add_argument("--output", required=True, metavar="FILE", help="the page")
    add_blocks(parser)
    parser.add_argument("--which", type=span, metavar="BYTES@ADDRESS", help="an address of A to describe")


def run_report(args: argparse.Namespace, tell: Tell) -> ReportAnswer:
    """Write the page; a finding if the pair cannot be compiled, or if a byte did not arrive."""
    check_file("--output", args.output)
    src, dst = layouts_of(args)
    compiles, verified = True, None
    if dst is None:
        if args.blocks or args.src or args.dst:
            raise KVPlanError("blocks are for a plan between two layouts; give B as well")
        sections = {"Layout": _layout(src)}
    else:
        answer = explain(src, dst, args, tell)
        verification, compiles = "", answer.compiled is not None
        if compiles:
            tell(None, "verifying")
            verification, verified = _verified(src, dst, reinterpret=args.reinterpret)
        sections = {
            "Verdict": _html([Table(_verdict(answer, verified)), *answer.orders()]),
            "Layouts": f"<h3>A: src</h3>{_layout(src)}<h3>B: dst</h3>{_layout(dst)}",
            "Difference": _html([answer.sides(), Table([*answer.rows()])]),
        }
        if answer.compiled is not None:
            program = _figure(answer.compiled.diagram(), "the runs of one unit") + _html([answer.text])
            plan = {"Plan": _html([answer.plan.text])} if answer.plan else {}
            sections |= {"Program": program, **plan, "Verification": verification}
    if args.which is not None:
        sections["Address"] = _html(which([src], *args.which).blocks())
    sections["Machine"] = _html(doctor(busy=False).blocks())
    # Names of files without their folders, which are private.
    names = (Path(name).name if Path(name).is_file() else name for name in (args.source, args.destination) if name)
    content = _page(f"kvplan: {' to '.join(names)}", sections).encode(errors="backslashreplace")  # a name's bytes
    write_file("--output", args.output, content)
    status = int(not compiles or verified is False)
    return ReportAnswer(args.output, len(content), tuple(sections), compiles, verified, status=status)


def _verdict(answer: ExplainAnswer, verified: bool | None) -> list[tuple[str, str]]:
    """Return the answer in a few rows."""
    if answer.compiled is None:
        return [("compiles", f"no: {answer.refused}")]
    return [
        ("runs", f"{times(answer.runs, *answer.run_nbytes)} a unit of {answer.compiled.program.unit_words}"),
        ("verified", f"{ARRIVED[verified]}: see Verification"),
        *([("path", answer.plan.verdict)] if answer.plan else []),
    ]


def _verified(src: KVLayout, dst: KVLayout, *, reinterpret: bool) -> tuple[str, bool | None]:
    """Move markers there and back, between reserved CPU memory with the strides of both."""
    drawn = random.Random(0)  # the same blocks each time
    counts = block_counts(src, dst, None)
    ids = [drawn.sample(range(side.num_blocks), some) for side, some in zip((src, dst), counts, strict=True)]
    try:
        here, there = reserve(src), reserve(dst)
        out = verify(here, there, blocks=(ids[0], ids[1]), reinterpret=reinterpret)
        back = verify(there, here, blocks=(ids[1], ids[0]), reinterpret=reinterpret)
    except LayoutError as error:  # a block is too large, or the system has no addresses left
        return _html([f"not tried: {error}"]), None
    return _html([Table([("there, by markers in CPU memory", out.text), ("back", back.text)])]), out.ok and back.ok


def _layout(layout: KVLayout) -> str:
    """Return the facts of a layout, its axes and a picture of a block."""
    try:
        picture = _figure(svg(block_picture(layout.built)), f"block 0 of {layout.notation}")
    except LayoutError as error:  # too many runs to draw
        picture = _html([str(error)])
    return _html(LayoutAnswer.read(layout).blocks()) + picture


def _html(blocks: Iterable[Any]) -> str:
    """Return tables and text as HTML."""
    return "".join(_table(block) if isinstance(block, Table) else f"<pre>{escape(block)}</pre>" for block in blocks)


def _table(block: Table) -> str:
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in block.header)] if block.header else []
    for row in block.rows:
        tags = ["th" if not (block.header or k) else 'td class="number"' if k in block.right else "td"
                for k in range(len(row))]  # fmt: skip
        lines.append("".join(f"<{tag}>{escape(cell)}</{tag[:2]}>" for tag, cell in zip(tags, row, strict=True)))
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _figure(picture: str, alt: str) -> str:
    """Return an HTML image of a picture. As an image, its styles and names do not affect the page."""
    data = b64encode(picture.encode()).decode()
    return f'<figure><img alt="{escape(alt)}" src="data:image/svg+xml;base64,{data}"></figure>'


def _page(title: str, sections: dict[str, str]) -> str:
    """Return the whole page; it begins with links to its sections."""
    about = f"kvplan {__version__}, Python {platform.python_version()}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    links = " ".join(f'<a href="#part-{k}">{name}</a>' for k, name in enumerate(sections))
    parts = (f'<section id="part-{k}"><h2>{name}</h2>\n{body}\n</section>' for k, (name, body) in
             enumerate(sections.items()))  # fmt: skip
    return "\n".join([
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style></head>\n<body>\n<h1>{escape(title)}</h1>",
        f"<p>{escape(about)}</p>\n<nav>{links}</nav>", *parts, "</body></html>\n",
    ])  # fmt: skip
