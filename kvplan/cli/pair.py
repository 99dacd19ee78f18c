"""``kvplan plan``, ``explain`` and ``advise``: the copies between two layouts, the path of a plan, better orders."""

from __future__ import annotations

import argparse
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field
from itertools import chain, product
from shutil import get_terminal_size
from typing import Any

from kvplan.advise.advise import Advice, Numbers, Order, advise, host_orders
from kvplan.advise.compare import OUTSIDE, Break, first_break, untouched
from kvplan.base.numbers import binary, count_of, exact
from kvplan.cli import arguments
from kvplan.cli.arguments import SIDES
from kvplan.cli.layouts import LayoutAnswer, layers_text
from kvplan.cli.screen import Address, Answer, Part, Table, Tell, facts, table
from kvplan.cost import explain as costs
from kvplan.cost.model import candidates
from kvplan.cost.policy import Policy, layer_edges
from kvplan.cost.statistics import counted
from kvplan.cost.store import profile_of
from kvplan.errors import BlockIndexError, IncompatibleLayoutsError, KVPlanError, LayoutError
from kvplan.layout.components import ADDRESSES
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.views import views
from kvplan.plan.copy_program import CopyProgram, compile_quietly
from kvplan.plan.plan import Plan, direction_of
from kvplan.program.explain import fitted
from kvplan.program.matching import UnwrittenHeads
from kvplan.program.passes import passes
from kvplan.program.program import Extents, Program, RunGroup

SHOWN_SIZES = 8
RANKS = ("best", "second", "third")


# ---- plan ------------------------------------------------------------------------------------------------------------


class Side(Part, sources=(KVLayout,), names="notation device addresses"):
    """One side of a pair."""

    def __str__(self) -> str:
        return f"{self.notation} on {self.device}{ADDRESSES[self.addresses]}"


class Size(Part):
    """Descriptors of one size.

    Attributes:
        count: their number.
        nbytes: bytes of each.
    """

    count: int
    nbytes: int


class Row(Part):
    """One descriptor.

    Attributes:
        src, dst: addresses.
        nbytes: bytes.
        src_region, dst_region: numbers of regions, by address.
        src_offset, dst_offset: bytes from the first byte of the region.
    """

    shown = "src, region: src_region, offset: src_offset, dst, region: dst_region, offset: dst_offset, nbytes"
    src: Address
    dst: Address
    nbytes: int
    src_region: int
    src_offset: int
    dst_region: int
    dst_offset: int


class PlanAnswer(Answer, sources=(Plan,), names="src dst direction nbytes units"):
    """The copies that move some blocks from one layout to another.

    Attributes:
        src, dst: both sides.
        unit_tokens: tokens of a unit; sub-blocks where all content is opaque.
        unit: a unit in words: 16 tokens, 2 sub-blocks, or 1 whole block.
        runs: contiguous copies before merging.
        descriptors: of the flat lowering.
        strided_rows: of the strided lowering.
        sizes: all descriptors by size, the largest first.
        rows: the first descriptors, in order of destination.
    """

    schema = "plan/1"
    shown = "src, dst, direction, units, unit, nbytes, runs, descriptors, sizes: words, strided_rows"
    src: Side
    dst: Side
    unit_tokens: int
    unit: str
    runs: int
    descriptors: int
    strided_rows: int
    sizes: tuple[Size, ...]
    rows: tuple[Row, ...]

    @property
    def words(self) -> str:
        """The sizes in words."""
        return sizes_in_words(self.sizes)

    def blocks(self) -> Iterable[Any]:
        """Return the sums and the first descriptors."""
        return [facts(self), *([table(self.rows)] if self.rows else [])]


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = """examples:
  kvplan plan examples/specs/gpu_split_kv.toml \\
      examples/specs/host_block_first_64.toml \\
      --src 0-10 --dst 0,1,3 --dst-skip 1 --limit all"""
    arguments.add_pair(parser)
    arguments.add_shared(parser, "--reinterpret")
    for side, done in zip(SIDES, ("read", "written"), strict=True):
        words = f"blocks {done}, in order of tokens: 0,1,4-7"
        parser.add_argument(f"--{side}", type=arguments.block_ids, required=True, metavar="IDS", help=words)
    for side in SIDES:
        words = f"units, not tokens, to skip in the first {side.upper()} block"
        parser.add_argument(f"--{side}-skip", type=arguments.whole, default=0, metavar="UNITS", help=words)
    parser.add_argument("--max-bytes", type=arguments.whole, metavar="N", help="bytes that no descriptor may exceed")
    shown = "descriptors shown (default 10), or all"
    parser.add_argument("--limit", type=_limit, default=10, metavar="ROWS", help=shown)


def run_plan(args: argparse.Namespace, tell: Tell) -> PlanAnswer:
    """Return the plan. Its descriptors are in order of destination."""
    import numpy as np

    tell(None, "planning")
    src, dst = arguments.layouts_of(args)
    program = compile_quietly(src, dst, reinterpret=args.reinterpret)
    ids = listed_ids("--src", args.src, src), listed_ids("--dst", args.dst, dst)
    plan = program.plan(*ids, args.src_skip, args.dst_skip)
    descriptors = plan.descriptors(args.max_bytes)
    first = np.argsort(descriptors.dst)[: args.limit]
    starts = [sorted(region.address for region in side.regions) for side in (src, dst)]
    rows = []
    for here, there, nbytes in zip(*(column[first].tolist() for column in descriptors), strict=True):
        regions = [bisect_right(known, at) - 1 for at, known in zip((here, there), starts, strict=True)]
        offsets = [at - known[k] for at, known, k in zip((here, there), starts, regions, strict=True)]
        places = chain(*zip(regions, offsets, strict=True))
        rows.append(Row(Address(here), Address(there), nbytes, *places))
    return PlanAnswer.of(
        plan,
        src=Side.of(src),
        dst=Side.of(dst),
        unit_tokens=program.unit_tokens,
        unit=program.program.unit_words,
        runs=program.runs * plan.units,
        descriptors=len(descriptors.size),
        strided_rows=len(plan.strided()),
        sizes=by_size(descriptors.size.tolist()),
        rows=tuple(rows),
    )


def listed_ids(option: str, ids: Sequence[range], layout: KVLayout) -> list[int]:
    """Return all ids. The ends of ranges are checked first, so that a mistyped range takes no memory."""
    last, most = max(some.stop for some in ids) - 1, layout.num_blocks - 1
    if last > most:
        raise BlockIndexError(f"{option} names block {last}; blocks there are 0 to {most}")
    return list(chain(*ids))


def by_size(nbytes: Iterable[int]) -> tuple[Size, ...]:
    """Return the number of descriptors of each size, the largest first."""
    return tuple(Size(count, size) for size, count in sorted(Counter(nbytes).items(), reverse=True))


def sizes_in_words(sizes: Sequence[Size]) -> str:
    """Return the number and the bytes of descriptors, the largest first.

    >>> sizes_in_words([Size(3, 8192), Size(1, 512)])
    '3*[8192] | 1*[512]'
    """
    more = len(sizes) - SHOWN_SIZES
    listed = " | ".join(f"{size.count}*[{size.nbytes}]" for size in sizes[:SHOWN_SIZES])
    return listed + f" | and {more:,} smaller sizes" * (more > 0)


def _limit(text: str) -> int | None:
    """Read the number of rows to show; None is for all rows."""
    return None if text == "all" else arguments.whole(text)


# ---- advise ----------------------------------------------------------------------------------------------------------

ORDER = "notation block_tokens unit_tokens unit_nbytes runs run_nbytes extents spec"


class OrderFacts(Part, sources=(Order, Numbers), names=ORDER):
    """An order of axes, and its copies.

    Attributes:
        extents: contiguous byte ranges of a unit on the side that may change.
        spec: from which KVLayout.from_spec makes it; absent of the present layout.
    """

    shown = "rank, order: notation, tokens: block_tokens, runs, run_nbytes, extents"
    extents: Extents
    spec: dict[str, Any] | None = None
    rank: str = field(kw_only=True)


class AdviceFacts(Part, sources=(Advice,), names="change tried reason present orders"):
    """Better orders of one side.

    Attributes:
        change: the side that may change, src or dst.
        tried: number of orders.
        reason: why no order was tried; else empty.
        present: its present order; null if there is none, or it cannot be compiled.
        orders: the best first.
    """

    present: OrderFacts | None
    orders: tuple[OrderFacts, ...]

    @classmethod
    def read(cls, advice: Advice, present: KVLayout | None) -> AdviceFacts:
        """Return the facts of an advice; ``present`` is the side that may change, as it is."""
        now = present and advice.present and OrderFacts.of(present, advice.present, spec=None, rank="now")
        ranked = zip(RANKS, advice.orders, strict=False)
        orders = tuple(OrderFacts.of(order, order.numbers, rank=rank) for rank, order in ranked)
        return cls.of(advice, present=now or None, orders=orders)

    @property
    def compared(self) -> list[OrderFacts]:
        """The present order, if there is one, and the better ones."""
        return [order for order in (self.present, *self.orders) if order is not None]

    def blocks(self, kept: str) -> Iterator[Any]:
        """Yield the orders, and what they come to; ``kept`` names the present layout."""
        if self.compared:
            yield table(self.compared)
        verdict = f"as above, of {count_of(self.tried, 'order')} that were tried"
        if not self.tried:
            verdict = f"not known, as no order was tried: {self.reason}"
        elif not self.orders:
            verdict = f"{kept}, as it is: none of {count_of(self.tried, 'order')} has fewer runs or extents"
        yield Table([("best", verdict)])


class AdviseAnswer(Answer):
    """The best orders of a host pool for a layout.

    Attributes:
        notation: of the layout that does not change.
        device: where it lies.
        block_tokens: its tokens a block.
        advice: the orders; their present is null without HOST.
    """

    schema = "advise/2"
    notation: str
    device: str
    block_tokens: int
    advice: AdviceFacts
    paste: str = field(kw_only=True)
    refused: str = field(kw_only=True)

    def blocks(self) -> Iterable[Any]:
        """Return the orders, and a call that makes a pool of the best."""
        about = [("for", f"{self.notation}, on {self.device}")]
        if self.refused:
            about.append(("HOST", f"cannot be compiled as it is: {self.refused}"))
        return [Table(about), *self.advice.blocks("HOST"), *([self.paste] if self.advice.orders else [])]


def add_advise(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = """examples:
  kvplan advise examples/specs/x_packed.toml --block-tokens 64
  kvplan advise examples/specs/gpu_split_kv.toml \\
      examples/specs/host_token_major.toml"""
    arguments.add_pair(parser, ("layout", "host"), "?", "cuda:0")
    tokens = "token slots per block of the pool (default: as HOST, else as LAYOUT)"
    parser.add_argument("--block-tokens", type=arguments.positive, metavar="N", help=tokens)


def run_advise(args: argparse.Namespace, tell: Tell) -> AdviseAnswer:
    """Return the best orders."""
    layout, host = arguments.layouts_of(args)
    refused, tokens = "", args.block_tokens or (host or layout).block_tokens
    if host is None:
        advice = host_orders(layout, tokens, tell=tell)
    else:
        advice = advise(layout, host, "dst", (tokens,), tell)
        try:
            compile_quietly(layout, host)
        except IncompatibleLayoutsError as error:
            refused = " ".join(str(error).split())
    sized = f", block_tokens={tokens}" * (tokens != layout.block_tokens)
    own = layout if host is None or not any(component.form.headed for component in host.components) else host
    heads = f", heads={own.heads}" * (own.heads != layout.heads)
    paste = ("# in Python, where `gpu` is the layout; --json has a spec\n"
             f'pool = kvplan.allocate("auto", like=gpu{sized}{heads})')  # fmt: skip
    return AdviseAnswer.of(layout, advice=AdviceFacts.read(advice, host), paste=paste, refused=refused)


# ---- explain ---------------------------------------------------------------------------------------------------------

SIDE = ("notation dtype device addresses layers parts heads num_blocks block_tokens token_nbytes block_nbytes "
        "padding_nbytes padding block_extents")  # fmt: skip
PROGRAM = "unit_tokens unit_nbytes src_units dst_units runs run_nbytes alignment"


class SideFacts(Part, sources=(LayoutAnswer,), names=SIDE):
    """The facts of one side, as in kvplan.inspect/1."""

    words: dict[str, str] = field(kw_only=True)

    @classmethod
    def read(cls, layout: KVLayout) -> SideFacts:
        """Return the facts of a layout."""
        answer = LayoutAnswer.read(layout)
        return cls.of(answer, words=answer.words)


class KindProgram(Part, sources=(Program,), names=f"parts layers opaque {PROGRAM} extents"):
    """The program of layers and parts that compile alike, without the others.

    Attributes:
        parts: their names.
        layers: global numbers.
        opaque: whether their blocks move whole.
        extents: contiguous byte ranges of a unit, by side.
    """

    parts: tuple[str, ...]
    layers: tuple[int, ...]
    opaque: bool
    extents: dict[str, Extents]


CHOICE = "direction nbytes units descriptors sizes overlap verdict profile candidates"


class PlanChoice(Part, sources=(Plan,), names=CHOICE):
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


PAIR = f"src dst direction refused keeps {PROGRAM.replace(' ', '? ')}? extents"


class ExplainAnswer(Answer, sources=(Program,), names=PAIR):
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
        parts: the programs of layers and parts that compile differently; else none.
        advice: better orders; null with --no-advice.
        plan: of the blocks that were given; absent without blocks.
    """

    schema = "explain/3"
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
    parts: tuple[KindProgram, ...]
    advice: AdviceFacts | None
    plan: PlanChoice | None = None
    compiled: CopyProgram | None = field(kw_only=True)

    def blocks(self) -> Iterable[Any]:
        """Return the passes, both sides beside each other, where runs end, better orders, and the plan."""
        yield from [self.compiled.explain(get_terminal_size().columns).rstrip("\n")] if self.compiled else []
        yield from (self.sides(), Table([*self.rows()]), *self.orders())
        yield from [self.plan.text] if self.plan else []

    def sides(self) -> Table:
        """Return the facts of both sides beside each other, and a star where they differ."""
        src, dst = self.src.words, self.dst.words
        rows = ((name, src.get(name, "-"), dst.get(name, "-")) for name in src | dst)
        return Table([(name, "*" * (a != b), a, b) for name, a, b in rows], ("* differs", "", *SIDES))

    def orders(self) -> Iterable[Any]:
        """Return better orders; nothing with --no-advice."""
        return [] if self.advice is None else self.advice.blocks(self.advice.change)

    def rows(self) -> Iterator[tuple[str, str]]:
        """Return where common runs end, and better orders."""
        if self.first_break is None:
            yield "no program", self.refused or ""
        else:
            yield from ((f"in {side}", line) for side, lines in self.keeps.items() for line in lines)
            every = {layer for kind in self.parts for layer in kind.layers}
            for kind in self.parts:
                layers = f", {layers_text(kind.layers)}" * (len(kind.layers) < len(every))
                runs = f"{times(kind.runs, *kind.run_nbytes)} a unit of {exact(kind.unit_nbytes)}"
                extents = (f"{kind.extents[side]} in {side}" for side in SIDES)
                yield ", ".join(kind.parts) + layers, ", ".join([runs, *extents])
            yield from _break_rows(self.first_break)
        if self.advice is not None:
            yield "orders", f"of {self.advice.change}, the side that may change (--change)"


def _break_rows(end: Break) -> Iterator[tuple[str, str]]:
    yield "breaks", f"the first run, {end.holds}, ends after {exact(end.nbytes)}" if end.axis else "nowhere: one run"
    yield "", f"then src {end.src.text}\nand dst {end.dst.text}"
    outside = all(side.axis in OUTSIDE and not side.lacked for side in (end.src, end.dst))
    if end.axis:
        yield "axis", end.axis + f": both leave the unit there, its next run is of another {end.axis}" * outside


def times(count: int, low: int, high: int) -> str:
    """Return a number of runs with their bytes.

    >>> times(160, 8192, 8192), times(2, 512, 8192)
    ('160 runs of 8 KiB', '2 runs of 512 to 8,192 bytes (8 KiB)')
    """
    return f"{count_of(count, 'run')} of {binary(high) if low == high else f'{low:,} to {exact(high)}'}"


def add_explain(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = """examples:
  kvplan explain "layer: kv block token head dim" \\
      "block layer kv token head dim" --dst-sizes block=256,token=64 \\
      --sizes layer=80,block=1024,token=16,head=2,dim=128
  kvplan explain examples/specs/host_block_first.toml \\
      examples/specs/gpu_split_kv.toml --blocks 0-15 --no-advice"""
    arguments.add_pair(parser)
    arguments.add_shared(parser, "--reinterpret", "--no-advice")
    arguments.add_blocks(parser)
    layers = "the plan is submitted by_layer: cut into groups of layers"
    parser.add_argument("--by-layer", action="store_true", help=layers)
    change = "the side that may change its order (default: the one on the host, else dst)"
    parser.add_argument("--change", choices=SIDES, help=change)
    parser.add_argument("--svg", metavar="FILE", help="write a picture of the runs of one unit as SVG")


def run_explain(args: argparse.Namespace, tell: Tell) -> ExplainAnswer:
    """Return the comparison, the program, and the path of a plan; a finding if the pair cannot be compiled."""
    if args.svg is not None:
        arguments.check_file("--svg", args.svg)
    tell(None, "compiling and planning")
    answer = explain(*arguments.layouts_of(args), args, tell)
    if args.svg is not None and answer.compiled is not None:
        arguments.write_file("--svg", args.svg, answer.compiled.diagram().encode())
    return answer


def explain(src: KVLayout, dst: KVLayout, args: argparse.Namespace, tell: Tell) -> ExplainAnswer:
    """Compare and compile two layouts, and plan the blocks of the arguments."""
    refused, compiled = None, None
    try:
        compiled = compile_quietly(src, dst, reinterpret=args.reinterpret)
    except IncompatibleLayoutsError as error:
        refused = " ".join(str(error).split())
        more = dict.fromkeys((*PROGRAM.split(), "text", "extents", "first_break"))
        more |= {"groups": (), "unwritten": (), "parts": (), "keeps": {}}
    else:
        more = _program(compiled) | {"plan": _plan(args, compiled)}
    advice = None
    if args.advice:
        side = getattr(args, "change", None) or ("src" if src.device == "cpu" and dst.device != "cpu" else "dst")
        advice = AdviceFacts.read(advise(src, dst, side, tell=tell), src if side == "src" else dst)
    return ExplainAnswer.of(
        compiled and compiled.program,
        src=SideFacts.read(src),
        dst=SideFacts.read(dst),
        direction=direction_of(src, dst),
        refused=refused,
        advice=advice,
        compiled=compiled,
        status=int(bool(refused)),
        **more,
    )


def _program(compiled: CopyProgram) -> dict[str, Any]:
    """Return the fields of a pair that can be compiled."""
    src, dst = compiled.src, compiled.dst
    result = passes(src.geometry, dst.geometry)
    return {
        "keeps": {side: tuple(text for on, text in untouched(result) if on == side) for side in SIDES},
        "extents": {side: compiled.program.extents(side) for side in SIDES},
        "groups": compiled.program.groups,
        "unwritten": compiled.unwritten,
        "text": compiled.explain(),
        "first_break": first_break(src, dst, result),
        "parts": _kind_programs(src, dst),
    }


def _kind_programs(src: KVLayout, dst: KVLayout) -> tuple[KindProgram, ...]:
    """Compile each kind of layers and parts alone; return no program if there is one kind."""
    kinds = []
    for here, there in product(views(src), views(dst)):
        parts = tuple(part for part in here.parts if part in there.parts)
        layers = tuple(layer for layer in here.layers if layer in there.layers)
        if not parts or not layers:
            continue
        try:
            pair = [side.slice(layers=layers, parts=parts) for side in (src, dst)]
            program = passes(pair[0].geometry, pair[1].geometry).program
        except (IncompatibleLayoutsError, LayoutError):  # this kind cannot be compiled without the others
            return ()
        extents = {side: program.extents(side) for side in SIDES}
        kinds.append(KindProgram.of(program, parts=parts, layers=layers, opaque=pair[0].opaque, extents=extents))
    return tuple(kinds) if len(kinds) > 1 else ()


def _plan(args: argparse.Namespace, program: CopyProgram) -> PlanChoice | None:
    """Return the path of a plan of the blocks that were given, or None if no blocks were given.

    Raises:
        BlockIndexError: a block that the layout does not have.
        KVPlanError: blocks of one side only, or a profile without blocks.
    """
    policy = Policy(overlap=args.overlap or "idle")
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
    plan = program.plan(src, dst)
    profile, where = profile_of(args.profile)
    sizes, width = by_size(plan.descriptors().size.tolist()), get_terminal_size().columns
    count = sum(size.count for size in sizes)
    lines = [f"plan: {plan.direction} of {count_of(plan.units, 'unit')}, {exact(plan.nbytes)}"]
    lines += [where] * bool(where) + [f"{count_of(count, 'descriptor')}: {sizes_in_words(sizes)}", ""]
    choice: dict[str, Any] = {"candidates": (), "overlap": None, "profile": None}
    if plan.direction not in profile.costs:
        choice["verdict"] = f"no cost model for a {plan.direction!r} plan; a profile has {', '.join(profile.costs)}"
        lines.append(choice["verdict"])
    else:
        edges = layer_edges(plan.nbytes, len(plan.layers)) if getattr(args, "by_layer", False) else ()
        explained = costs.Explained(counted(plan, edges), plan.direction, profile, policy)
        ranked = candidates(*explained)
        choice = costs.facts(ranked, explained)
        lines += [f"layers:  {len(edges) - 1} groups, one after another"] * (len(edges) > 2)
        lines += costs.explain(ranked, explained, width).splitlines()
    text = "\n".join(line for each in lines for line in fitted(each, width, 4))
    return PlanChoice.of(plan, descriptors=count, sizes=sizes, **choice, text=text)
