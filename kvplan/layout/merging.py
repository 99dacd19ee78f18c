"""Join several layouts into one with all their components, and with each region once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvplan.base.limits import Budget
from kvplan.errors import LayoutError
from kvplan.layout.components import Built, Region, seams_within, subblocks_of, touching_seams
from kvplan.layout.disjoint import check_disjoint


def merged(layouts: Sequence[Built], budget: Budget | None = None) -> Built:
    """Join several layouts; see :meth:`kvplan.KVLayout.merge`.

    Args:
        layouts: at least one layout.
        budget: limits of the work for the whole document that contains the layouts.
    """
    if not layouts:
        raise LayoutError("merge of no layouts; give at least one")
    first = layouts[0]
    seen: dict[tuple[int, str], int] = {}
    for k, layout in enumerate(layouts):
        if layout.num_blocks != first.num_blocks:
            raise LayoutError(f"layout {k} has {layout.num_blocks} blocks, layout 0 has {first.num_blocks}")
        if layout.device != first.device:
            raise LayoutError(f"layout {k} is on {layout.device}, layout 0 on {first.device}")
        for component in layout.components:
            other = seen.setdefault((component.layer, component.part), k)
            if other != k:
                raise LayoutError(f"layouts {other} and {k} both hold {component}; name the part or the layers")
    tokens = {layout.block_tokens for layout in layouts if not layout.opaque}
    if len(tokens) > 1:
        raise LayoutError(f"block_tokens differ: {sorted(tokens)}; give layouts with blocks of equal size")
    block_tokens = max(tokens, default=0) or subblocks_of(c for layout in layouts for c in layout.components)
    for component in (c for layout in layouts for c in layout.components if c.form.opaque):
        if block_tokens % component.form.subblocks:
            raise LayoutError(f"{component} has {component.form.subblocks} sub-blocks a block of {block_tokens} "
                              "tokens; their number divides the tokens")  # fmt: skip
    components = tuple(sorted((c for layout in layouts for c in layout.components), key=lambda c: c.layer))
    if len(layouts) > 1:
        check_disjoint(components, budget)
    regions = _merge_regions([region for layout in layouts for region in layout.regions])
    sizes = {name: size for layout in reversed(layouts) for name, size in layout.sizes.items()}
    if "layer" in sizes:
        sizes["layer"] = len({component.layer for component in components})
    dtype = " + ".join(dict.fromkeys(layout.dtype for layout in layouts))
    notation = " + ".join(dict.fromkeys(layout.notation for layout in layouts))
    return Built(components, regions, first.num_blocks, block_tokens, sizes, dtype, notation)


def _merge_regions(regions: Sequence[Region]) -> tuple[Region, ...]:
    """Return one region per allocation, with the seams of all layouts and of registrations that touch."""
    found: dict[tuple[int, int], Region] = {}
    touching = touching_seams(list({(r.address, r.nbytes): r for r in regions}.values()))
    for r in regions:
        known = found.get((r.address, r.nbytes), r)
        seams = tuple(sorted({*r.seams, *known.seams, *seams_within(touching, r)}))
        found[r.address, r.nbytes] = replace(r, writable=r.writable and known.writable, seams=seams)
    return tuple(found[key] for key in sorted(found))
