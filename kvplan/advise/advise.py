"""Find the orders of axes in which a pool holds a layout's content in the fewest runs and extents.

The content is cut into atoms: layers, K and V, and each factor of tokens, heads and rows. An order of a pool is a
permutation of the atoms; its runs and extents follow from the strides of both sides. The best orders are compiled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import combinations, groupby, pairwise, permutations, takewhile
from math import gcd, lcm, prod
from typing import Any, NamedTuple

from kvplan.base.numbers import number_ranges
from kvplan.errors import IncompatibleLayoutsError, LayoutError
from kvplan.layout.components import Component
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.spec import DEVICE_BASE, HOST_BASE
from kvplan.layout.strides import coalesce, cut, extent
from kvplan.layout.tensors import ITEMSIZE
from kvplan.program.passes import compile_geometry
from kvplan.program.program import Program

SHOWN = 3
COMPILED = 8  # orders: the best ones by their strides
WORTH = 4  # an order is not shown if it takes this many times the runs of the best one
MOST_BLOCK_TOKENS = 1024
USUAL = ("block", "layer", "kv", "token", "subblock", "head", "dim")  # of equal orders, the nearest to this one wins
FREE = 6  # atoms that are permuted; if there are more, the innermost ones move together
FAR = 1 << 80  # a stride that no other continues

Dims = tuple[tuple[str, int], ...]
Tell = Callable[[float | None, str], None]  # of the share done and a text


class Numbers(NamedTuple):
    """The numbers of a program by which orders are compared.

    Attributes:
        unit_tokens, unit_nbytes: tokens and bytes per unit.
        runs, run_nbytes: number of runs per unit; bytes of the smallest and of the largest run.
        extents: extents per unit on the side that may change: their number, smallest bytes and largest bytes.
    """

    unit_tokens: int
    unit_nbytes: int
    runs: int
    run_nbytes: tuple[int, int]
    extents: tuple[int, int, int]

    @property
    def rank(self) -> tuple[Fraction, Fraction]:
        """Return runs and extents per token, because orders may have different units; smaller is better."""
        return Fraction(self.runs, self.unit_tokens), Fraction(self.extents[0], self.unit_tokens)


class Atom(NamedTuple):
    """One loop of a block: its axis, its steps, and bytes from step to step in the layout; 0 if the layout lacks it."""

    axis: str
    steps: int
    stride: int


class Kind(NamedTuple):
    """Parts of one shape, and the layers that hold them.

    Attributes:
        parts: names of the parts; K and V of one shape are two.
        layers: global numbers of the layers.
        dtype: name of the elements; ``uint8`` if rows are no whole elements.
        heads: global numbers of the pool's heads; None without an axis of heads.
        first: the first component.
        outer: the atoms of blocks, of units of a block, of shares of the heads, of layers, and of K and V.
        inner: the atoms of one unit, in order of memory.
    """

    parts: tuple[str, ...]
    layers: tuple[int, ...]
    dtype: str
    heads: range | None
    first: Component
    outer: tuple[Atom, ...]
    inner: tuple[Atom, ...]


class Pool(NamedTuple):
    """The pool that an order is looked for: its device, its token slots, and its heads, None for the layout's."""

    device: str
    slots: int
    heads: range | None = None


class Order(NamedTuple):
    """An order of axes for the side that may change.

    Attributes:
        pool: the pool.
        dims: for each kind, its dims, outermost first: name and extent in elements.
        block_tokens: token slots per block.
        rank: runs and extents per token, by the strides; smaller is better.
        far: split axes, and the distance from the usual order; smaller is better if ranks are equal.
        shared: number of outermost dims that all kinds share, so that one page holds all of them; 0 if each has an
            allocation.
        numbers: of its program, once it is compiled.
    """

    pool: Pool
    dims: tuple[tuple[Kind, Dims], ...]
    block_tokens: int
    rank: tuple[Fraction, Fraction]
    far: tuple[int, int]
    shared: int = 0
    numbers: Numbers | None = None

    @property
    def notation(self) -> str:
        """The notation; parts of one page stand behind ``|``, as :func:`kvplan.allocate` takes them, and allocations of
        their own are joined by ``" + "``."""
        if not self.shared:
            return " + ".join(dict.fromkeys(words(dims) for _, dims in self.dims))
        sections: list[tuple[list[str], str]] = []
        for kind, dims in self.dims:
            text = words(dims[self.shared :])
            if sections and sections[-1][1] == text and (kind.parts[0] in sections[-1][0] or "kv" not in text.split()):
                sections[-1][0].extend(part for part in kind.parts if part not in sections[-1][0])
            else:
                sections.append((list(kind.parts), text))
        shared = words(self.dims[0][1][: self.shared])
        return " | ".join((shared, *(f"{' '.join(parts)}: {text}" for parts, text in sections)))

    @property
    def sizes(self) -> dict[str, int] | None:
        """The extents of split axes that :func:`kvplan.allocate` needs for a page; None if no call can make it.

        The call has one extent for each name. A name with several is left out, if the other factors determine it.
        """
        if not self.shared:
            return None
        extents: dict[str, set[int]] = {}
        for name, size in (dim for _, dims in self.dims for dim in dims):
            if "." in name or name == "subblock":
                extents.setdefault(name, set()).add(size)
        unclear = {name for name, sizes in extents.items() if len(sizes) > 1}
        for _, dims in self.dims:
            axes = [name.partition(".")[0] for name, _ in dims if name in unclear]
            if len(axes) > len(set(axes)) or "subblock" in axes:
                return None
        return {name: sizes.pop() for name, sizes in extents.items() if name not in unclear}

    @property
    def spec(self) -> dict[str, Any]:
        """The spec from which :meth:`kvplan.KVLayout.from_spec` makes the pool."""
        specs: list[dict[str, Any]] = []
        for kind, dims in self.dims:
            part = kind.parts[0] if len(kind.parts) == 1 else kind.parts[0].partition("_")[2] or "kv"
            spec = {"notation": words(dims), "dtype": kind.dtype, "device": self.pool.device, "sizes": dict(dims),
                    "part": part, "layers": list(kind.layers)}  # fmt: skip
            specs.append(spec if kind.heads is None else spec | {"head_start": kind.heads.start})
        if self.shared:
            self._place(specs, DEVICE_BASE.get(self.pool.device.partition(":")[0], HOST_BASE))
        return specs[0] if len(specs) == 1 else {"layouts": specs}

    def _place(self, specs: Sequence[dict[str, Any]], base: int) -> None:
        """Give specs the addresses and strides of the parts of one page, as :func:`kvplan.allocate` places them.

        Each part begins at a multiple of the bytes of its elements, and so does each page.
        """
        end, elements = 0, [ITEMSIZE[kind.dtype] for kind, _ in self.dims]
        extents = [[size for _, size in dims] for _, dims in self.dims]
        for spec, sizes, element in zip(specs, extents, elements, strict=True):
            start = -(-end // element) * element
            spec["address"], end = base + start, start + prod(sizes[self.shared :]) * element
        page = -(-end // lcm(*elements)) * lcm(*elements)
        for spec, sizes, element in zip(specs, extents, elements, strict=True):
            outer = [prod(sizes[k + 1 : self.shared]) * (page // element) for k in range(self.shared)]
            spec["strides"] = outer + [prod(sizes[k + 1 :]) for k in range(self.shared, len(sizes))]


class Advice(NamedTuple):
    """The orders that are better than the present order.

    Attributes:
        change: the side that may change: ``"src"`` or ``"dst"``.
        tried: number of orders that were compared.
        present: numbers of the present pair; None if there is none, or it cannot be compiled.
        orders: at most three better orders with different numbers, the best first.
        reason: why no order was tried; "" if some were.
    """

    change: str
    tried: int
    present: Numbers | None
    orders: tuple[Order, ...]
    reason: str = ""


# ---- the search ------------------------------------------------------------------------------------------------------


def host_orders(
    layout: KVLayout, block_tokens: int | None = None, *, heads: range | None = None, device: str = "cpu",
    single: bool = False, tell: Tell | None = None,
) -> Advice:  # fmt: skip
    """Return the best orders of a pool that holds a layout's content. More layers make no difference to the order.

    Args:
        layout: the layout that does not change, such as an engine's cache.
        block_tokens: token slots per block of the pool; by default as in the layout.
        heads: global numbers of its KV heads; by default the layout's.
        device: where the pool lies.
        single: whether all parts must be in one allocation.
        tell: called with the share of the work that is done, and a text.

    >>> spec = {"notation": "layer: kv block head dim.0 token dim.1", "device": "cuda:0",
    ...         "sizes": {"layer": 32, "block": 64, "token": 16, "head": 8, "dim": 128, "dim.1": 8}}
    >>> best = host_orders(KVLayout.from_spec(spec), 64).orders[0]
    >>> best.notation, best.block_tokens, best.numbers.run_nbytes
    ('block token.0 layer kv head dim.0 token.1 dim.1', 64, (32768, 32768))
    """
    pool = Pool(device, layout.num_blocks * layout.block_tokens, heads)
    return _search(layout, pool, (block_tokens or layout.block_tokens,), "dst", single=single, tell=tell)


def advise(
    src: KVLayout, dst: KVLayout, change: str, sizes: tuple[int, ...] = (), tell: Tell | None = None
) -> Advice:  # fmt: skip
    """Compare many orders of one side of a pair, and return those that are better than the present one.

    The orders are the permutations of layer, K/V, block, token and head, each with several block sizes, and with the
    tokens, heads and content split as the other side splits them. Parts and layers that differ have an allocation each,
    each in its best order, or one page for all of them. The best order has the fewest runs per token; then the fewest
    extents per token on the side that changes; then it is the nearest to "block layer kv token head dim".

    Args:
        src, dst: the layouts.
        change: the side that may change, ``"src"`` or ``"dst"``.
        sizes: token slots per block to try; by default several.
        tell: called with the share of the work that is done, and a text.

    >>> sizes = {"layer": 80, "block": 64, "token": 16, "head": 2, "dim": 128}
    >>> gpu, host = (KVLayout.from_spec({"notation": n, "sizes": sizes})
    ...              for n in ("layer: kv block token head dim", "kv (block token) layer head dim"))
    >>> best = advise(gpu, host, "dst").orders[0]
    >>> best.notation, best.numbers.runs, best.numbers.run_nbytes, best.numbers.extents[0]
    ('block layer kv token head dim', 160, (8192, 8192), 1)
    """
    mine, other = (src, dst) if change == "src" else (dst, src)
    try:
        present = _judged(mine, other, change)
    except IncompatibleLayoutsError:
        present = None
    if reason := _unlike(mine, other):
        return Advice(change, 0, present, (), reason)
    headed = any(component.form.headed for component in mine.components)
    pool = Pool(
        mine.device,
        mine.num_blocks * mine.block_tokens,
        mine.heads if headed and isinstance(mine.heads, range) else None,
    )
    return _search(other, pool, sizes or _block_sizes(mine, other), change, present, tell=tell)


def _search(
    other: KVLayout, pool: Pool, sizes: Sequence[int], change: str, present: Numbers | None = None, *,
    single: bool = False, tell: Tell | None = None,
) -> Advice:  # fmt: skip
    """Return the best orders of a pool for a layout, and better ones than the present order, if there is one."""
    listed, compiled = list[Order](), dict[Any, Order]()
    tried, reason = 0, ""
    for tokens in (other.block_tokens,) if other.opaque else sizes:
        try:
            some, count = candidates(other, pool, tokens)
        except LayoutError as error:
            reason = reason or str(error)
        else:
            listed += [order for order in some if not single or order.shared or len(order.dims) == 1]
            tried += count
    # Of equal orders, those of the own block size come first.
    listed.sort(key=lambda order: (order.rank, order.block_tokens != sizes[0], order.far))
    for k, order in enumerate(listed[:COMPILED]):
        if tell is not None:
            tell(k / COMPILED, f"order {k + 1:,} of {min(len(listed), COMPILED):,}")
        try:
            numbers = _judged(KVLayout.from_spec(order.spec), other, change)
        except (IncompatibleLayoutsError, LayoutError) as error:  # LayoutError: past the address space
            reason = reason or str(error)
        else:
            compiled.setdefault(numbers.rank, order._replace(numbers=numbers))
    if not compiled:
        return Advice(change, 0, present, (), reason or "no order holds all parts in one allocation")
    ranks = [rank for rank in sorted(compiled) if rank[0] <= WORTH * min(compiled)[0]]
    better = [compiled[rank] for rank in ranks if present is None or rank < present.rank]
    return Advice(change, tried, present, tuple(better[:SHOWN]))


def _unlike(mine: KVLayout, other: KVLayout) -> str:
    """Return why no order of a side holds what the other side holds; "" if some do."""
    missing, more = (sorted(set(a.layers) - set(b.layers)) for a, b in ((other, mine), (mine, other)))
    for layers, where in ((missing, "this side lacks"), (more, "the other side lacks")):
        if layers:
            return f"{where} layers {number_ranges(layers)}; slice them away: layout.slice(layers=...)"
    nbytes = [Fraction(side.block_nbytes, side.block_tokens) for side in (mine, other)]
    if mine.heads == other.heads and nbytes[0] != nbytes[1]:
        return f"this side holds {float(nbytes[0]):,.7g} bytes a token, and the other side {float(nbytes[1]):,.7g}"
    return ""


def _block_sizes(mine: KVLayout, other: KVLayout) -> tuple[int, ...]:
    """Return the block sizes to try, in token slots: of this side, of the other side, some halves and multiples."""
    own, its = other.block_tokens if mine.opaque else mine.block_tokens, other.block_tokens
    sizes = dict.fromkeys((own, own * 2, its, its * 2, its * 4, own // 2 if own % 2 == 0 else own))
    return tuple(size for size in sizes if size <= max(MOST_BLOCK_TOKENS, own))


def numbers_of(program: Program, side: str) -> Numbers:
    """Return the numbers of a program; extents are counted on ``side`` (``"src"`` or ``"dst"``)."""
    return Numbers(program.unit_tokens, program.unit_nbytes, program.runs, program.run_nbytes, program.extents(side))


def _judged(mine: KVLayout, other: KVLayout, change: str) -> Numbers:
    src, dst = (mine, other) if change == "src" else (other, mine)
    return numbers_of(compile_geometry(src.geometry, dst.geometry), change)


def words(dims: Dims) -> str:
    """Return the names of dims, as a notation has them."""
    return " ".join(name for name, _ in dims)


def parts_of(spec: dict[str, Any]) -> tuple[str, ...]:
    """Return the parts that a spec holds.

    >>> parts_of({"notation": "block kv dim"}), parts_of({"notation": "block dim", "part": "index"})
    (('k', 'v'), ('index',))
    """
    part = spec.get("part", "kv")
    if "kv" not in spec["notation"].split():
        return (part,)
    return ("k", "v") if part == "kv" else (f"k_{part}", f"v_{part}")


def candidates(layout: KVLayout, pool: Pool, tokens: int) -> tuple[list[Order], int]:
    """Return the best orders of one block size, one for each number of runs and extents, and the number of all tried.

    Args:
        layout: the layout whose content the pool holds.
        pool: the pool.
        tokens: token slots per block of the pool.

    Raises:
        LayoutError: no order of such a pool can be listed; the message says why.
    """
    unit = gcd(tokens, layout.block_tokens)
    alone = kinds(layout, pool, tokens)
    together = paired(alone)
    best = [_best(kind) for kind in together]
    several = []
    for chosen in zip(*(some for some, _ in best), strict=False):  # of each kind its best order, then its second
        runs, extents, splits, moves = map(sum, zip(*(rank + far for rank, far, _ in chosen), strict=True))
        dims = tuple((kind, dims) for kind, (_, _, dims) in zip(together, chosen, strict=True))
        several.append(Order(pool, dims, tokens, (Fraction(runs, unit), Fraction(extents, unit)), (splits, moves)))
    pages = [*_page(pool, paired(alone, inside=True), tokens, by_layer=True),
             *_page(pool, together, tokens, by_layer=False)]  # fmt: skip
    pages = list(dict.fromkeys(pages)) if len(together) > 1 else []
    return [*pages, *several], len(pages) + sum(count for _, count in best)


# ---- kinds -----------------------------------------------------------------------------------------------------------


def kinds(layout: KVLayout, pool: Pool, tokens: int) -> list[Kind]:
    """Return each part of a layout, and each shape of its layers; parts of one page in the order of their bytes.

    Raises:
        LayoutError: a unit does not hold whole sub-blocks or factors, or the heads are no share of the pool's.
    """
    shapes: dict[tuple[object, ...], list[list[Component]]] = {}
    ordered = sorted(layout.components, key=lambda c: (layout.parts.index(c.part), c.layer, c.form.head_start))
    for _, some in groupby(ordered, key=lambda component: (component.part, component.layer)):
        line = [*some]
        shapes.setdefault((line[0].part, len(line), line[0].form, line[0].dtype), []).append(line)
    alone = [_kind(lines, layout, pool, tokens) for lines in shapes.values()]
    # Allocations may lie anywhere: their order in memory says nothing.
    memory = [max(each.address for each in layout.regions if each.address <= kind.first.address) for kind in alone]
    placed = sorted(
        zip(map(memory.index, memory), alone, strict=True), key=lambda each: (each[0], each[1].first.address)
    )
    parts = list(dict.fromkeys(kind.parts for _, kind in placed))
    return sorted(alone, key=lambda kind: (parts.index(kind.parts), kind.layers))


def _kind(lines: Sequence[Sequence[Component]], layout: KVLayout, pool: Pool, tokens: int) -> Kind:
    first, form, unit = lines[0][0], lines[0][0].form, gcd(tokens, layout.block_tokens)
    slots, rest = divmod(extent(form.token) * unit, layout.block_tokens)
    halves = None if rest else cut(form.token, slots)
    if halves is None:
        raise LayoutError(f"{first}: {unit:,} tokens, which blocks of both sides hold, are no whole part of its blocks")
    dtype = first.dtype or layout.dtype
    row = form.dim[-1] if form.dim else (1, 1)
    dtype = dtype if row[1] == 1 and row[0] % ITEMSIZE.get(dtype, row[0] + 1) == 0 else "uint8"
    dim = [*form.dim[:-1], (row[0] // ITEMSIZE[dtype], ITEMSIZE[dtype])]
    layers = tuple(line[0].layer for line in lines)
    own = range(form.head_start, lines[0][-1].form.heads.stop)
    whole = pool.heads if pool.heads is not None and own == layout.heads and form.headed else own
    if (own.start - whole.start) % len(own) or len(whole) % len(own) or not {own[0], own[-1]} <= set(whole):
        raise LayoutError(f"heads {own[0]} to {own[-1]} are no equal share of heads {whole[0]} to {whole[-1]}")
    slot = "subblock" if form.opaque else "token"
    head = form.head if len(lines[0]) == 1 else ((len(own), _step(lines[0])),)
    places = _step([line[0] for line in lines])
    outer = (Atom("block", max(pool.slots // tokens, 1), 0), Atom(slot, tokens // unit, 0),
             Atom("head", len(whole) // len(own), 0), Atom("layer", len(layers), places))  # fmt: skip
    axes = ((slot, halves[1]), ("head", head), ("dim", dim))
    inner = (Atom(axis, *factor) for axis, factors in axes for factor in factors)
    return Kind(
        (first.part,), layers, dtype, whole if form.headed else None, first,
        tuple(atom for atom in outer if atom.steps > 1 or atom.axis == "block"),
        tuple(sorted((atom for atom in inner if atom.steps > 1), key=lambda atom: -atom.stride)),
    )  # fmt: skip


def _step(line: Sequence[Component]) -> int:
    """Return the bytes between neighbours; :data:`FAR` if they differ."""
    steps = {b.address - a.address for a, b in pairwise(line)}
    return steps.pop() if len(steps) == 1 and min(steps) > 0 else FAR


def paired(alone: Iterable[Kind], *, inside: bool = False) -> list[Kind]:
    """Return the kinds with K and V of one shape together; if ``inside``, only where one lies inside the other."""
    together: list[Kind] = []
    for kind in alone:
        mate = next((other for other in together if _mates(kind, other)), None)
        step = abs(kind.first.address - mate.first.address) if mate else 0
        if mate is None or (inside and step >= max((atom.stride for atom in kind.inner), default=0)):
            together.append(kind)
        else:
            k, v = sorted((mate, kind), key=lambda each: each.parts)
            pair = k._replace(parts=k.parts + v.parts, outer=(*k.outer, Atom("kv", 2, step)))
            together[together.index(mate)] = pair
    return together


def _mates(kind: Kind, other: Kind) -> bool:
    """Return whether two kinds are K and V of one shape."""
    names = sorted((kind.parts[0], other.parts[0]))
    same = kind.first.form == other.first.form and kind._replace(parts=other.parts, first=other.first) == other
    return same and [name[:1] for name in names] == ["k", "v"] and names[0][1:] == names[1][1:]


# ---- orders ----------------------------------------------------------------------------------------------------------


def _best(kind: Kind) -> tuple[list[tuple[Any, Any, Dims]], int]:
    """Return rank, distance and dims of the best permutations, one for each rank; and the number of permutations."""
    last = [atom for atom in kind.inner[-1:] if atom.axis == "dim"]  # contiguous content stays innermost
    free = [*kind.outer, *kind.inner[: len(kind.inner) - len(last)]]
    groups = [[atom] for atom in free[: FREE - 1]] + ([free[FREE - 1 :]] if len(free) >= FREE else [])
    # Atoms of one axis keep their order, and blocks stand outside their tokens.
    tied = {"token": {"block"}, "subblock": {"block"}}
    axes = [set().union(*({atom.axis} | tied.get(atom.axis, set()) for atom in group)) for group in groups]
    before = [(a, b) for a, b in combinations(range(len(groups)), 2) if axes[a] & axes[b]]
    best: dict[Any, tuple[Any, Dims]] = {}
    tried = 0
    for order in permutations(range(len(groups))):
        if all(order.index(a) < order.index(b) for a, b in before):
            atoms = [*(atom for k in order for atom in groups[k]), *last]
            dims = _dims(kind, atoms)
            rank, how = _rank(kind, atoms), (_far(dims), dims)
            best[rank], tried = min(best.get(rank, how), how), tried + 1
    return sorted((rank, *how) for rank, how in best.items()), tried


def _rank(kind: Kind, atoms: Sequence[Atom]) -> tuple[int, int]:
    """Return the runs of a unit, and its extents in the pool, from the strides of both sides."""
    element = stride = ITEMSIZE[kind.dtype]
    mine, both = [], []
    for atom in reversed(atoms):
        if atom.stride:
            both.append((atom.steps, atom.stride, stride))
            mine.append((atom.steps, stride, stride))
        stride *= atom.steps
    runs, extents = (prod(loop[0] for loop in coalesce(element, loops)[1]) for loops in (both, mine))
    return runs, extents


def _dims(kind: Kind, atoms: Sequence[Atom]) -> Dims:
    """Return the dims of atoms: neighbours of one axis are one dim, and axes of one step have their usual place."""
    named: list[tuple[str, int]] = []
    for axis, steps, _ in atoms:
        named[-1:] = [(axis, named[-1][1] * steps)] if named and named[-1][0] == axis else [*named[-1:], (axis, steps)]
    axes = {axis for axis, _ in named}
    at = len(named) - (named[-1][0] == "dim")
    still = (("token", not kind.first.form.opaque), ("head", kind.heads is not None))
    named[at:at] = [(axis, 1) for axis, there in still if there and axis not in axes]
    if "layer" not in axes:
        named.insert([axis for axis, _ in named].index("block") + 1, ("layer", 1))
    counts, seen = Counter(axis for axis, _ in named), Counter[str]()
    dims = []
    for axis, size in named:
        dims.append((axis if counts[axis] == 1 else f"{axis}.{seen[axis]}", size))
        seen[axis] += 1
    return tuple(dims)


def _far(dims: Dims) -> tuple[int, int]:
    axes = [USUAL.index(name.partition(".")[0]) for name, _ in dims]
    return sum("." in name for name, _ in dims), sum(a > b for a, b in combinations(axes, 2))


def _page(pool: Pool, together: Sequence[Kind], tokens: int, *, by_layer: bool) -> Iterator[Order]:
    """Yield the order in which one page of a block, or of a layer of a block, holds all kinds."""
    lead = ("block", "token", "subblock", "head", "layer")[: 4 + by_layer]
    dims, counts = [], []
    for kind in together:
        first = [atom for atom in kind.outer if atom.axis in lead]
        rest = [atom for atom in (*kind.outer, *kind.inner) if atom not in first]
        dims.append((kind, _dims(kind, [*first, *sorted(rest, key=lambda atom: -atom.stride)])))
        counts.append(len(first) + (by_layer and len(kind.layers) == 1))
    alike = len({kind.layers for kind in together}) == 1
    outer = zip(*(some[: min(counts)] for _, some in dims), strict=True)
    same = takewhile(lambda each: len(set(each)) == 1 and (alike or each[0][0] != "layer"), outer)
    shared = sum(1 for _ in same)
    page = Order(pool, tuple(dims), tokens, (Fraction(0), Fraction(0)), (0, 0), shared)
    # One call has one text for the layers of a part.
    texts = {(kind.parts, words(some[shared:])) for kind, some in dims}
    if shared and len(texts) == len({kind.parts for kind in together}) and page.sizes is not None:
        yield page
