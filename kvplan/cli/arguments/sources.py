"""Layouts from the command line: a spec file, or a notation with its sizes."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from kvplan.base.quoting import quoted
from kvplan.errors import KVPlanError, LayoutError, bounded
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.notation import parse

SOURCE = "a .toml or .json spec, a dump, or a notation (in quotes), which needs --sizes"
SIZES = "AXIS=EXTENT,..."

_LACKED = re.compile(r"needs sizes\['([a-z.0-9]+)'\]")
_SIZE = re.compile(r"([a-z]+(?:\.[0-9]+)?)=([0-9]{1,18})")


def add_layout(parser: argparse.ArgumentParser) -> None:
    """Arguments that name one layout; read by :func:`layout_of`."""
    parser.add_argument("layout", metavar="SPEC", help=SOURCE)
    parser.add_argument(
        "--sizes", type=sizes, metavar=SIZES, help="of a notation, in elements: layer=80,block=1024,..."
    )
    parser.add_argument("--dtype", help="of a notation (default bf16)")
    parser.add_argument("--device", help="of a notation (default cpu)")


def add_pair(parser: argparse.ArgumentParser, names: tuple[str, str] = ("SRC", "DST")) -> None:
    """Arguments that name a source and a destination layout; read by :func:`pair_of`."""
    parser.add_argument("source", metavar=names[0], help=SOURCE)
    parser.add_argument("destination", metavar=names[1], help="the same")
    parser.add_argument("--sizes", type=sizes, metavar=SIZES, help="of notations, in elements: layer=80,block=1024,...")
    for side, name in zip(("src", "dst"), names, strict=True):
        parser.add_argument(f"--{side}-sizes", type=sizes, metavar=SIZES, help=f"where {name} differs")
    parser.add_argument("--dtype", help="of notations (default bf16)")
    for side, name in zip(("src", "dst"), names, strict=True):
        parser.add_argument(f"--{side}-device", metavar="DEVICE", help=f"of {name}, a notation (default cpu)")


def layout_of(args: argparse.Namespace) -> KVLayout:
    """The layout that :func:`add_layout`'s arguments name.

    Raises:
        KVPlanError: it cannot be read, or is none.
    """
    given = {"--sizes": args.sizes, "--dtype": args.dtype, "--device": args.device}
    if _is_file(args.layout):
        _refuse(args.layout, given)
        return _from_file(args.layout)
    return _from_notation(args.layout, args.sizes or {}, args.dtype, args.device)


def pair_of(args: argparse.Namespace) -> tuple[KVLayout, KVLayout]:
    """The source and destination layouts that :func:`add_pair`'s arguments name.

    Raises:
        KVPlanError: one of them cannot be read, or is none.
    """
    if _is_file(args.source) and _is_file(args.destination):
        _refuse(args.source, {"--sizes": args.sizes, "--dtype": args.dtype})
    return _one_of_pair(args, args.source, "src"), _one_of_pair(args, args.destination, "dst")


def _one_of_pair(args: argparse.Namespace, source: str, side: str) -> KVLayout:
    own_sizes, device = getattr(args, f"{side}_sizes"), getattr(args, f"{side}_device")
    if _is_file(source):
        _refuse(source, {f"--{side}-sizes": own_sizes, f"--{side}-device": device})
        return _from_file(source)
    # --sizes speaks to both notations: what only the other one names is not for this one.
    notation = parse(source)
    names = notation.axes | {str(atom) for dim in notation.dims for atom in dim}
    common = {name: extent for name, extent in (args.sizes or {}).items() if name in names}
    return _from_notation(source, common | (own_sizes or {}), args.dtype, device)


def _from_file(path: str) -> KVLayout:
    try:
        return KVLayout.from_spec(path)
    except KVPlanError as error:
        if str(Path(path)) not in str(error):  # of two files, which
            error.args = (bounded(f"{path}: {error}"),)
        raise
    except RecursionError as error:
        raise KVPlanError(f"{path}: nested too deeply to be read; a spec has two levels") from error
    except ValueError as error:  # numbers of thousands of digits, a zero byte in the path
        raise KVPlanError(f"cannot read the spec {quoted(path)}: {error}") from error


def _from_notation(notation: str, extents: dict[str, int], dtype: str | None, device: str | None) -> KVLayout:
    spec: dict[str, Any] = {"notation": notation, "sizes": extents, "dtype": dtype or "bf16", "device": device or "cpu"}
    try:
        return KVLayout.from_spec(spec)
    except LayoutError as error:
        lacked = _LACKED.search(str(error))
        if lacked is None:
            raise
        raise LayoutError(f"{error}; give --sizes {lacked[1]}=EXTENT,...") from error


def _is_file(source: str) -> bool:
    if source.endswith((".toml", ".json")) or "/" in source:  # no notation holds a slash
        return True
    return not re.search(r"[\s:(]", source) and Path(source).is_file()  # of one word


def _refuse(source: str, given: dict[str, Any]) -> None:
    for option, value in given.items():
        if value is not None:
            raise KVPlanError(f"{option} goes with a notation; {quoted(source)} is a file, which tells its own")


def sizes(text: str) -> dict[str, int]:
    """Extents by axis.

    >>> sizes("layer=80,head.1=4")
    {'layer': 80, 'head.1': 4}
    """
    extents: dict[str, int] = {}
    for item in text.split(","):
        match = _SIZE.fullmatch(item.strip())
        if match is None:
            raise argparse.ArgumentTypeError(f"{quoted(item)} is no AXIS=EXTENT, as in layer=80,block=1024")
        name, extent = match.groups()
        if name in extents:
            raise argparse.ArgumentTypeError(f"{quoted(name)} stands twice in {quoted(text)}")
        extents[name] = int(extent)
    return extents
