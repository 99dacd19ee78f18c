"""``kvplan explain``: compare two layouts, print their copy program pass by pass, and the path of a plan."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import field, replace
from shutil import get_terminal_size
from typing import Any

from kvplan.advise.advise import advise
from kvplan.advise.compare import OUTSIDE, Break, first_break, untouched
from kvplan.advise.host_order import pricing_for
from kvplan.base.numbers import count_of, exact
from kvplan.cli.advise import OrderFacts, order_blocks, orders
from kvplan.cli.answer import Answer, Part, Table, facts
from kvplan.cli.arguments import SIDES, add_blocks, add_pair, add_shared, pair_of, whole
from kvplan.cli.inspect import LayoutAnswer, times
from kvplan.cli.plan import Size, by_size, listed_ids, sizes_in_words
from kvplan.cli.screen import Tell, check_file, write_file
from kvplan.cost.explain import Explained
from kvplan.cost.explain import explain as cost_text
from kvplan.cost.explain import facts as cost_facts
from kvplan.cost.model import candidates
from kvplan.cost.policy import Policy, layer_edges
from kvplan.cost.statistics import counted
from kvplan.cost.store import profile_of
from kvplan.errors import IncompatibleLayoutsError, KVPlanError, LayoutError
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.copy_program import CopyProgram, compile_quietly
from kvplan.plan.plan import Plan, direction_of
from kvplan.program.explain import fitted
from kvplan.program.passes import passes
from kvplan.program.program import Extents, Program, RunGroup
from kvplan.program.unwritten import UnwrittenHeads

EXAMPLES = """examples:
  kvplan explain "layer: kv block token head dim" \\
      "block layer kv token head dim" --dst-sizes block=256,token=64 \\
      --sizes layer=80,block=1024,token=16,head=2,dim=128
  kvplan explain examples/specs/host_block_first.toml \\
      examples/specs/gpu_split_kv.toml --blocks 0-15 --no-advice"""
KNOBS = ("max_programs", "staging_bytes")
SIDE = ("notation dtype device addresses layers parts heads num_blocks block_tokens token_nbytes block_nbytes "
        "padding_nbytes padding block_extents")  # fmt: skip
PROGRAM = "unit_tokens unit_nbytes src_units dst_units runs run_nbytes alignment"


class SideFacts(Part, sources=(LayoutAnswer,), names=SIDE):
    """The facts of one side, as in kvplan.inspect/1."""


class PartProgram(Part, sources=(Program,), names=f"parts opaque {PROGRAM} extents"):
    """The program of parts that compile alike, without the others.

    Attributes:
        parts: their names.
        opaque: whether their blocks move whole.
        extents: contiguous byte ranges of a unit, by side.
    """

    parts: tuple[str, ...]
    opaque: bool
    extents: dict[str, Extents]


class AdviceFacts(Part):
    """Better orders of one side.

    Attributes:
        change: the side that may change, src or dst.
        tried: number of orders.
        present: its present order.
        orders: the best first.
    """

    change: str
    tried: int
    present: OrderFacts | None
    orders: tuple[OrderFacts, ...]


class PlanChoice(
    Part, sources=(Plan,), names="direction nbytes units descriptors sizes overlap verdict profile candidates"
):
    """A plan of some blocks, and the path that it would take.

    Attributes:
        descriptors: of the flat lowering.
        sizes: all descriptors by size, the largest first.
        overlap: compute at the same time; null without a cost model.
        verdict: which path is taken, and why.
        profile: whose costs; null without a cost model.
        candidates: each path with its predicted seconds and their terms; the first is taken.
    """

    descriptors: int
    sizes: tuple[Size, ...]
    overlap: str | None
    verdict: str
    profile: dict[str, str] | None
    candidates: tuple[dict[str, Any], ...]
    text: str = field(kw_only=True)


class ExplainAnswer(
    Answer, sources=(Program,), names=f"src dst direction refused keeps {PROGRAM.replace(' ', '? ')}? extents"
):
    """Two layouts, their copy program, where common runs end, better orders, and the path of a plan.

    Attributes:
        src, dst: the facts of both sides.
        direction: load, store, host or device.
        refused: why they cannot be compiled, else null; facts of the program are null then.
        keeps: of each side, what the program leaves out, in words.
        extents: contiguous byte ranges of a unit, by side.
        groups: the runs of a unit.
        unwritten: heads of the destination that no unit writes.
        text: the program after each pass.
        first_break: where the first run from the start of the destination's unit ends.
        parts: the programs of parts that compile differently; else none.
        advice: better orders; null with --no-advice.
        plan: of the blocks that were given; absent without blocks.
    """

    schema = "explain/2"
    src: SideFacts
    dst: SideFacts
    direction: str
    refused: str | None
    keeps: dict[str, tuple[str, ...]]
    extents: dict[str, Extents] | None
    groups: tuple[RunGroup, ...]
    unwritten: tuple[UnwrittenHeads, ...]
    text: str | None
    first_break: Break | None
    parts: tuple[PartProgram, ...]
    advice: AdviceFacts | None
    plan: PlanChoice | None = None
    passes: str = field(kw_only=True)
    sides: Table = field(kw_only=True)
    compiled: CopyProgram | None = field(default=None, kw_only=True)

    def blocks(self) -> Iterable[Any]:
        """Return the passes, both sides beside each other, where runs end, better orders, and the plan."""
        yield from [self.passes] if self.passes else []
        yield from (self.sides, Table([*self.rows()]), *self.orders())
        yield from [self.plan.text] if self.plan else []

    def orders(self) -> Iterable[Any]:
        """Return better orders; nothing with --no-advice."""
        return [] if self.advice is None else order_blocks(self.advice, self.advice.change)

    def rows(self) -> Iterator[tuple[str, str]]:
        """Return where common runs end, and better orders."""
        if self.first_break is None:
            yield "no program", self.refused or ""
        else:
            yield from ((f"in {side}", line) for side, lines in self.keeps.items() for line in lines)
            for one in self.parts:
                runs = f"{times(one.runs, *one.run_nbytes)} a unit of {exact(one.unit_nbytes)}"
                yield ", ".join(one.parts), ", ".join([runs, *(f"{one.extents[side]} in {side}" for side in SIDES)])
            yield from _break_rows(self.first_break)
        if self.advice is not None:
            yield "orders", f"of {self.advice.change}, the side that may change (--change)"


def _break_rows(end: Break) -> Iterator[tuple[str, str]]:
    first = f"the first run, of layer {end.start.layer} {end.start.part}"
    yield "breaks", f"{first}, ends after {exact(end.nbytes)}: {end.holds}" if end.axis else "nowhere: one run"
    yield "", f"then src {end.src.text}\nand dst {end.dst.text}"
    outside = all(side.axis in OUTSIDE and not side.lacked for side in (end.src, end.dst))
    if end.axis:
        yield "axis", end.axis + f": both leave the unit there, its next run is of another {end.axis}" * outside


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = EXAMPLES
    add_pair(parser)
    add_shared(parser, "--reinterpret", "--advice")
    add_blocks(parser)
    for name in KNOBS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=whole, metavar="N", help=f"the policy's {name}")
    layers = "the plan is submitted by_layer: cut into groups of layers"
    parser.add_argument("--by-layer", action="store_true", help=layers)
    change = "the side that may change its order (default: the one on the host, else dst)"
    parser.add_argument("--change", choices=SIDES, help=change)
    parser.add_argument("--svg", metavar="FILE", help="write a picture of the runs of one unit as SVG")


def run(args: argparse.Namespace, tell: Tell) -> ExplainAnswer:
    """Return the comparison, the program, and the path of a plan; a finding if the pair cannot be compiled."""
    if args.svg is not None:
        check_file("--svg", args.svg)
    tell(None, "compiling and planning")
    answer = explain(*pair_of(args), args, tell)
    if args.svg is not None and answer.compiled is not None:
        write_file("--svg", args.svg, answer.compiled.diagram().encode())
    return answer


def explain(src: KVLayout, dst: KVLayout, args: argparse.Namespace, tell: Tell) -> ExplainAnswer:
    """Compare and compile two layouts, and plan the blocks of the arguments."""
    sides = {"src": LayoutAnswer.read(src), "dst": LayoutAnswer.read(dst)}
    width, program, more = get_terminal_size().columns, None, {}
    refused = passes_text = ""
    try:
        program = compile_quietly(src, dst, reinterpret=args.reinterpret)
    except IncompatibleLayoutsError as error:
        refused = " ".join(str(error).split())
        more = dict.fromkeys((*PROGRAM.split(), "text", "extents", "first_break"))
        more |= {"groups": (), "unwritten": (), "parts": (), "keeps": {}}
    else:
        policy = Policy(overlap=args.overlap or "idle", **{name: getattr(args, name, None) for name in KNOBS})  # type: ignore[arg-type]
        plan = plan_of(args, program)
        more = _program(program)
        more["plan"] = None if plan is None else choice(plan, args, policy, width)
        passes_text = program.explain(width).rstrip("\n")
    return ExplainAnswer.of(
        program and program.program,
        src=SideFacts.of(sides["src"]),
        dst=SideFacts.of(sides["dst"]),
        direction=direction_of(src, dst),
        refused=refused or None,
        advice=_advice(src, dst, getattr(args, "change", None), tell) if args.advice else None,
        passes=passes_text,
        sides=beside(sides),
        compiled=program,
        status=int(bool(refused)),
        **more,
    )


def beside(sides: dict[str, LayoutAnswer]) -> Table:
    """Return the facts of both sides beside each other, and a star where they differ."""
    src, dst = ({name: said for name, said in facts(side).rows} for side in sides.values())  # noqa: C416
    rows = [
        (name, "*" * (src.get(name) != dst.get(name)), src.get(name, "-"), dst.get(name, "-")) for name in src | dst
    ]
    return Table(rows, ("* differs", "", *sides))


def _program(compiled: CopyProgram) -> dict[str, Any]:
    """Return the fields of a pair that can be compiled."""
    src, dst = compiled.src, compiled.dst
    made = passes(src.geometry, dst.geometry)
    return {
        "keeps": {side: tuple(text for on, text in untouched(made) if on == side) for side in SIDES},
        "extents": {side: compiled.program.extents(side) for side in SIDES},
        "groups": compiled.program.groups,
        "unwritten": compiled.unwritten,
        "text": compiled.explain(),
        "first_break": first_break(src, dst, made),
        "parts": _part_programs(src, dst),
    }


def _part_programs(src: KVLayout, dst: KVLayout) -> tuple[PartProgram, ...]:
    """Compile each part of both sides alone. Return no program if all agree in units, runs and extents."""
    kinds: list[PartProgram] = []
    for part in (part for part in src.parts if part in dst.parts):
        try:
            pair = [side.slice(parts=(part,)) for side in (src, dst)]
            program = passes(pair[0].geometry, pair[1].geometry).program
        except (IncompatibleLayoutsError, LayoutError):  # this part cannot be compiled without the others
            return ()
        extents = {side: program.extents(side) for side in SIDES}
        alone = PartProgram.of(program, parts=(part,), opaque=pair[0].opaque, extents=extents)
        same = next((k for k, one in enumerate(kinds) if replace(one, parts=(part,)) == alone), None)
        if same is None:
            kinds.append(alone)
        else:
            kinds[same] = replace(kinds[same], parts=(*kinds[same].parts, part))
    return tuple(kinds) if len(kinds) > 1 else ()


def _advice(src: KVLayout, dst: KVLayout, change: str | None, tell: Tell) -> AdviceFacts:
    """Search better orders of one side, the host's or else dst, by the predicted time of the pair's own direction."""
    side = change or ("src" if src.device == "cpu" and dst.device != "cpu" else "dst")
    stays, moves = (dst, src) if side == "src" else (src, dst)
    pricing = pricing_for(stays, moves.device, profile_of(None)[0], directions=(direction_of(src, dst),))
    return AdviceFacts(side, **orders(advise(src, dst, side, pricing=pricing, tell=tell), moves))


def plan_of(args: argparse.Namespace, program: CopyProgram) -> Plan | None:
    """Return a plan of the blocks that were given, or None if no blocks were given.

    Raises:
        BlockIndexError: a block that the layout does not have.
        KVPlanError: blocks of one side only, or a profile without blocks.
    """
    ids = {side: getattr(args, side) or args.blocks for side in SIDES}
    if not any(ids.values()):
        if args.profile is not None:
            raise KVPlanError("--profile is for a plan; give --blocks, or --src and --dst")
        return None
    for side, some in ids.items():
        if some is None:
            raise KVPlanError(f"blocks of {side.upper()} are missing; give --blocks, or --src and --dst")
    named = (f"--{side}" if getattr(args, side) else "--blocks" for side in SIDES)
    src, dst = map(listed_ids, named, ids.values(), (program.src, program.dst))
    return program.plan(src, dst)


def choice(plan: Plan, args: argparse.Namespace, policy: Policy, width: int = 80) -> PlanChoice:
    """Return the candidates of a plan as facts and as text."""
    profile, where = profile_of(args.profile)
    sizes = by_size(plan.descriptors().size.tolist())
    count = sum(size.count for size in sizes)
    moved = f"plan: {plan.direction} of {count_of(plan.units, 'unit')}, {exact(plan.nbytes)}"
    text = "\n".join(
        [moved, *([where] if where else []), f"{count_of(count, 'descriptor')}: {sizes_in_words(sizes)}", "", ""]
    )
    if plan.direction not in profile.costs:
        why = f"no cost model for a {plan.direction!r} plan; a profile has {', '.join(profile.costs)}"
        made: dict[str, Any] = {"candidates": (), "verdict": why, "overlap": None, "profile": None}
        text += why
    else:
        edges = layer_edges(plan.nbytes, len(plan.layers)) if getattr(args, "by_layer", False) else ()
        counts, most = counted(plan, edges), policy.staging_bytes
        granule = max((one.granule_nbytes for one, _ in counts), default=0)
        small = most is not None and granule > most
        refused = {"staged": f"a block takes {granule:,} bytes of the ring, which has {most:,}"} if small else {}
        found = candidates(counts, plan.direction, profile, policy, refused)
        explained = Explained(counts, plan.direction, profile, policy)
        made = cost_facts(found, explained)
        text += f"layers:  {len(edges) - 1} groups, one after another\n" * (len(edges) > 2)
        text += cost_text(found, explained, width)
    lines = (line for whole_line in text.splitlines() for line in fitted(whole_line, width, 4))
    return PlanChoice.of(plan, descriptors=count, sizes=sizes, **made, text="\n".join(lines))
