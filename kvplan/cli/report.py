"""``kvplan report``: put all facts of one layout or of a pair on one page, to attach to an issue."""

from __future__ import annotations

import argparse
import platform
import random
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from kvplan.base.numbers import exact
from kvplan.base.version import __version__
from kvplan.cli.answers.diff_rows import FACT_HEADER, advice_rows, fact_rows, told_rows
from kvplan.cli.answers.difference import Difference, difference_of
from kvplan.cli.answers.layout_facts import layout_facts
from kvplan.cli.answers.layout_rows import axis_rows, summary_rows, view_title
from kvplan.cli.answers.place_rows import place_rows
from kvplan.cli.answers.plan_facts import candidates_of, plan_of
from kvplan.cli.answers.verdict import called, commands_of, order_bars, path_bars, times_of, verdict_rows
from kvplan.cli.arguments.sources import add_advice, add_blocks, add_pair, add_reinterpret, pair_of, source_of
from kvplan.cli.arguments.values import span
from kvplan.cli.screen.documents import check_file, print_json, write_file
from kvplan.cli.screen.printing import PATIENCE, Tell, progress
from kvplan.draw.page import Section, bars, figure, folded, page, sides, table, text
from kvplan.errors import IncompatibleLayoutsError, KVPlanError, LayoutError
from kvplan.layout.places import locate

if TYPE_CHECKING:
    from kvplan.layout.kvlayout import KVLayout

EXAMPLES = """examples:
  kvplan report examples/specs/gpu_split_kv.toml --output report.html
  kvplan report examples/specs/host_block_first.toml \\
      examples/specs/gpu_split_kv.toml --blocks 0-15 --output report.html
  kvplan report dump.json --which 16@0x7f0000002000 --output report.html"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = EXAMPLES
    add_pair(parser, ("A", "B"), both=False)
    add_reinterpret(parser)
    parser.add_argument("--output", required=True, metavar="FILE", help="the page")
    add_blocks(parser, ("A", "B"))
    add_advice(parser)
    parser.add_argument("--which", type=span, metavar="BYTES@ADDRESS", help="an address of A to describe")
    parser.add_argument("--json", action="store_true", help="one JSON object (schema kvplan.report)")


def run(args: argparse.Namespace) -> int:
    """Write the page. Return 1 if the pair cannot be compiled, or if a byte did not arrive."""
    check_file("--output", args.output)
    sections, compiles, verified = _sections(args)
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    title = f"kvplan: {called(args.source)}" + (f" to {called(args.destination)}" if args.destination else "")
    page_text = page(title, f"kvplan {__version__}, Python {platform.python_version()}, {now}", sections)
    made = page_text.encode(errors="backslashreplace")  # a file name need not be UTF-8
    write_file("--output", args.output, made)
    nbytes = len(made)
    if args.json:
        titles = [section.title for section in sections]
        print_json("report", {"path": args.output, "nbytes": nbytes, "sections": titles, "compiles": compiles,
                              "verified": verified})  # fmt: skip
    else:
        print(f"{args.output}: {', '.join(section.title for section in sections)}; {exact(nbytes)}")
    return int(not compiles or verified is False)


def _sections(args: argparse.Namespace) -> tuple[list[Section], bool, bool | None]:
    """Return the sections, whether the pair compiles, and whether every byte arrived (None: not tried)."""
    if args.destination is None:
        if args.blocks or args.src or args.dst:
            raise KVPlanError("blocks are for a plan between two layouts; give B as well")
        layout = source_of(args)
        shown = Section("Layout", _facts(layout) + _picture(layout))
        return [shown, *_address(layout, args), _machine(), *_commands(args)], True, None
    src, dst = pair_of(args)
    with progress(silent=args.json, after=PATIENCE) as tell:
        return _pair_sections(src, dst, args, tell)


def _pair_sections(
    src: KVLayout, dst: KVLayout, args: argparse.Namespace, tell: Tell
) -> tuple[list[Section], bool, bool | None]:
    tell(None, "comparing")
    found = difference_of(src, dst, reinterpret=args.reinterpret, advice=args.advice, tell=tell)
    told = table([*told_rows(found), *advice_rows(found)])
    beside = sides(f"<h3>A</h3>{_facts(src)}", f"<h3>B</h3>{_facts(dst)}")
    # Half a page is too narrow for a picture.
    pictures = f"<h3>A, block 0</h3>{_picture(src)}<h3>B, block 0</h3>{_picture(dst)}"
    made = [
        Section("Layouts", beside + pictures),
        Section("Difference", table(fact_rows(found), FACT_HEADER) + told),
    ]
    verified = None
    if found.made is not None:
        tell(None, "verifying")
        section, verified = _verified(src, dst, reinterpret=args.reinterpret)
        made += [*_program(src, dst, args), section]
    verdict = _verdict(found, args, verified)
    return [verdict, *made, *_address(src, args), _machine(), *_commands(args)], found.made is not None, verified


def _verdict(found: Difference, args: argparse.Namespace, verified: bool | None) -> Section:
    """Return the verdict, and bars of the predicted times of paths and of better orders."""
    from kvplan.cost.policy import Policy

    times = times_of(found, args.profile if args.blocks or args.src else None, Policy(overlap=args.overlap))
    charts = (("time by path", path_bars(times)), ("time by order", order_bars(found)))
    drawn = "".join(f"<h3>{title}</h3>{bars(rows)}" for title, rows in charts if rows)
    return Section("Verdict", table(verdict_rows(found, times, verified)) + drawn)


def _commands(args: argparse.Namespace) -> Iterator[Section]:
    made = commands_of(args)
    if made:
        yield Section("Commands", text("\n".join(made)))


def _facts(layout: KVLayout) -> str:
    facts = layout_facts(layout)
    axes = "".join(
        table(axis_rows(view), (view_title(view, facts), "extent", "stride in bytes"), right=(1, 2))
        for view in facts["views"]
    )
    return table(summary_rows(facts)) + folded("axes", axes)


def _picture(layout: KVLayout) -> str:
    from kvplan.draw.block import block_picture
    from kvplan.draw.svg import block_svg

    try:
        return figure(block_svg(block_picture(layout.built)), f"block 0 of {layout.notation}")
    except LayoutError as error:  # too many runs to draw
        return text(str(error))


def _program(src: KVLayout, dst: KVLayout, args: argparse.Namespace) -> Iterator[Section]:
    from kvplan.cost.policy import Policy
    from kvplan.plan.copy_program import compile_quietly

    policy = Policy(overlap=args.overlap)
    try:
        program = compile_quietly(src, dst, reinterpret=args.reinterpret)
    except IncompatibleLayoutsError:  # the difference already says this
        return
    yield Section(
        "Program", figure(program.diagram(), "the runs of one unit") + folded("passes", text(program.explain()))
    )
    plan = plan_of(args, program)
    if plan is not None:
        yield Section("Plan", text(candidates_of(plan, args.profile, policy)[1]))


def _verified(src: KVLayout, dst: KVLayout, *, reinterpret: bool) -> tuple[Section, bool | None]:
    """Move markers to the other layout and back, between reserved CPU memory with the strides of both."""
    from kvplan.memory.reserve import reserve
    from kvplan.verification.verify import block_counts, verify

    counts = block_counts(src, dst, None)
    drawn = random.Random(0)  # noqa: S311  # the same blocks each time
    ids = [drawn.sample(range(side.num_blocks), some) for side, some in zip((src, dst), counts, strict=True)]
    try:
        here, there = reserve(src), reserve(dst)
        out = verify(here, there, blocks=(ids[0], ids[1]), reinterpret=reinterpret)
        back = verify(there, here, blocks=(ids[1], ids[0]), reinterpret=reinterpret)
    except LayoutError as error:  # a block is too large, or the system has no addresses left
        return Section("Verification", text(f"not tried: {error}")), None
    rows = [("there, by markers in CPU memory", out.text), ("back", back.text)]
    return Section("Verification", table(rows)), out.ok and back.ok


def _address(layout: KVLayout, args: argparse.Namespace) -> Iterator[Section]:
    if args.which is not None:
        nbytes, address = args.which
        places = locate(layout, address, nbytes)
        yield Section("Address", table(place_rows(layout, places, address, nbytes)))


def _machine() -> Section:
    from kvplan.measure.doctor import examine, gather

    found = examine(gather(busy=False))
    rows = [(one.name, one.state, f"{one.what}\n{one.advice}".strip()) for one in found]
    return Section("Machine", table(rows, ("", "", "found, and what to do")))
