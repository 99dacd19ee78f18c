"""Texts of a block's picture: labels, captions and descriptions."""

from __future__ import annotations

from kvplan.base.numbers import nbytes_text, rounded
from kvplan.draw.block import Band, BlockPicture, Cell, Fold, Zoom
from kvplan.draw.content import Gap

TIMES = "\N{MULTIPLICATION SIGN}"
Label = tuple[str, str]  # a name, and bytes


def labels(cell: Cell) -> tuple[Label, ...]:
    """Return the label of a cell, first in full and then in shorter forms.

    The bytes of a band or fold are the bytes of the block, without gaps.

    >>> labels(Gap(516096, 0))
    (('other blocks', '516,096 bytes'), ('other blocks', '504 KiB'), ('others', '504 KiB'))
    """
    if isinstance(cell, Fold):
        more = f"{cell.count:,} more" if cell.same else f"{cell.count:,} others"
        return (more, nbytes_text(cell.content)), (more, rounded(cell.content)), (f"+{cell.count:,}", "")
    nbytes = cell.content if isinstance(cell, Band) else cell.nbytes
    exact, short = nbytes_text(nbytes), rounded(nbytes)
    if isinstance(cell, Gap):
        brief = "pad" if cell.name == "padding" else "others"
        return (cell.name, exact), (cell.name, short), (brief, short)
    return (cell.name, exact), (cell.name, short), (cell.name.replace("token", "tok").replace("bytes ", ""), short)


def spoken(cell: Cell) -> str:
    """Describe a cell in one line, for tool tips and screen readers.

    >>> spoken(Gap(700, 100))
    'other blocks: 700 bytes, of them 100 bytes of padding'
    """
    name, nbytes = labels(cell)[0]
    if isinstance(cell, Gap):
        mixed = 0 < cell.padding < cell.nbytes
        return f"{name}: {nbytes}" + (f", of them {nbytes_text(cell.padding)} of padding" if mixed else "")
    if isinstance(cell, Fold) or cell.solid:
        return f"{name}: {nbytes}"
    return f"{name}: {nbytes} in {cell.runs:,} run{'s' * (cell.runs != 1)}, over {cell.nbytes:,}"


def caption(row: Zoom) -> Label:
    """Return the caption of a row: its axis and count, and the bytes of each coordinate.

    >>> inside = Band("head 0", ("k",), 256, 256, 1)
    >>> token = Band("token 0", ("k",), 512, 512, 1, "head", 2, 256, (inside, inside))
    >>> caption(Zoom(("k", "token 0"), token, None, ("v",)))[1]
    '256 bytes each, no gaps'
    """
    band = row.band
    each = band.each
    if band.axis == "allocation":
        return f"allocation {TIMES} {band.count:,}", f"{nbytes_text(each.content)} of the block in each"
    if band.axis == "part":
        what = " and ".join(band.parts) if len(band.parts) <= 3 else f"{len(band.parts)} parts"
        apart = "" if band.stride is None or band.stride == each.nbytes else f", {nbytes_text(band.stride)} apart"
        sizes = f"{nbytes_text(each.content)} each{apart}" if band.stride else nbytes_text(band.content)
        return what, sizes
    if band.stride is None:
        return (band.axis or "pieces") if band.count > 1 else "bytes", nbytes_text(band.content)
    spaced = "no gaps" if band.stride == each.nbytes else f"{nbytes_text(band.stride)} apart"
    return f"{band.axis or 'piece'} {TIMES} {band.count:,}", f"{nbytes_text(each.content)} each, {spaced}"


def place(row: Zoom) -> str:
    """Return the name of the band whose inside a row shows.

    >>> place(Zoom(("layer 0", "k"), Band("k", ("k",), 8, 8, 1), 0, ("v",)))
    'in layer 0, k (v alike)'
    """
    if not row.path:
        return ""
    alike = f" ({', '.join(row.others)} alike)" if row.others else ""
    # "layers 0-5" is left out if "layer 0" follows.
    names = [name for name, after in zip(row.path, (*row.path[1:], ""), strict=True)
             if not (name.startswith("layers ") and after.startswith("layer "))]  # fmt: skip
    return f"in {', '.join(names)}{alike}"


def verdict(row: Zoom, *, inside: bool) -> str:
    """Return the number of runs of a row, in words.

    Args:
        row: the row.
        inside: whether the band around the row is contiguous.
    """
    if inside:
        return "same run"
    return "one run" if row.band.runs == 1 else f"{row.band.runs:,} runs"


def scale(band: Band, *, proportional: bool) -> str:
    """Return words on whether the widths of a row are in proportion to bytes.

    Args:
        band: the band whose inside the row shows.
        proportional: whether the widths of the row's cells are in proportion to bytes.

    >>> token, pad = Band("token 0", ("k",), 48, 48, 1), Gap(16, 16)
    >>> scale(Band("k", ("k",), 64, 48, 1, "token", 1, None, (token, pad)), proportional=True)
    'to scale'
    """
    if not proportional or band.axis == "allocation" or any(isinstance(cell, Fold) for cell in band.cells):
        return "not to scale"
    return "to scale" if all(map(_even, band.cells)) else "bands to scale, not their inside"


def _even(cell: Cell) -> bool:
    """Return whether a small cell shows its inside to scale: if all cells inside have the same size."""
    if not isinstance(cell, Band) or not cell.cells or (cell.solid and len(cell.parts) == 1):
        return True
    if any(isinstance(inner, Fold) for inner in cell.cells):
        return False
    sizes = {inner.nbytes for inner in cell.cells if not isinstance(inner, Fold)}
    return len(sizes) == 1 and all(map(_even, cell.cells))


def inside_run(rows: list[Zoom], row: Zoom) -> bool:
    """Return whether the band around a row is contiguous, so that the row shows a piece of one run."""
    return row.parent is not None and rows[row.parent].band.runs == 1


def description(picture: BlockPicture) -> str:
    """Describe the whole picture in sentences, for screen readers."""
    told = [f"Layout {picture.notation}; {picture.headline}."]
    for row in picture.rows():
        what, nbytes = caption(row)
        cells = "; ".join(spoken(cell) for cell in row.band.cells)
        told.append(f"{what}{' ' + place(row) if row.path else ''}, {nbytes}: {cells}.")
    return " ".join(told)
