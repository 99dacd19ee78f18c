"""Read layouts: from a spec file, or from a notation and its sizes."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from kvplan.base.quoting import quoted
from kvplan.cli.arguments.values import block_ids
from kvplan.errors import KVPlanError, LayoutError, bounded
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.notation import parse

SOURCE = "a .toml or .json spec, a dump, or a notation (in quotes), which needs --sizes"
SIZES = "AXIS=EXTENT,..."
IN_ELEMENTS = "in elements: layer=80,block=1024,..."
SIDES = ("src", "dst")

_LACKED = re.compile(r"needs sizes\['([a-z.0-9]+)'\]")
_SIZE = re.compile(r"([a-z]+(?:\.[0-9]+)?)=([0-9]{1,18})")


def add_layout(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name one layout; :func:`layout_of` reads them."""
    parser.add_argument("layout", metavar="SPEC", help=SOURCE)
    parser.add_argument("--sizes", type=sizes, metavar=SIZES, help=f"of a notation, {IN_ELEMENTS}")
    parser.add_argument("--dtype", help="of a notation (default bf16)")
    parser.add_argument("--device", help="of a notation (default cpu)")


def add_pair(
    parser: argparse.ArgumentParser,
    names: tuple[str, str] = ("SRC", "DST"),
    *,
    both: bool = True,
    devices: tuple[str, str] = ("cpu", "cpu"),
) -> None:
    """Add the arguments that name a source and a destination layout; :func:`pair_of` reads them.

    Args:
        parser: parser of the command.
        names: names of the source and the destination in the help.
        both: whether the destination is required; if not, :func:`source_of` reads the source alone.
        devices: devices of notations, if no option names one.
    """
    parser.set_defaults(devices=dict(zip(SIDES, devices, strict=True)))
    parser.add_argument("source", metavar=names[0], help=SOURCE)
    parser.add_argument("destination", metavar=names[1], nargs=None if both else "?",
                        help="the same" if both else "the same: the other side")  # fmt: skip
    parser.add_argument("--sizes", type=sizes, metavar=SIZES, help=f"of notations, {IN_ELEMENTS}")
    for side, name in zip(SIDES, names, strict=True):
        parser.add_argument(f"--{side}-sizes", type=sizes, metavar=SIZES, help=f"where {name} differs")
    parser.add_argument("--dtype", help="of notations (default: the other file's, or bf16)")
    for side, name in zip(SIDES, names, strict=True):
        parser.add_argument(f"--{side}-device", metavar="DEVICE",
                            help=f"of {name}, a notation (default {parser.get_default('devices')[side]})")  # fmt: skip


def add_advice(parser: argparse.ArgumentParser) -> None:
    """Add the argument that leaves out the search of better orders."""
    parser.add_argument("--no-advice", dest="advice", action="store_false",
                        help="search no better orders, which takes most of the time")  # fmt: skip


def add_reinterpret(parser: argparse.ArgumentParser) -> None:
    """Add the argument that lets bytes of one number format be read as another one."""
    parser.add_argument("--reinterpret", action="store_true",
                        help="compile although number formats differ; a copy converts no numbers")  # fmt: skip


def add_blocks(parser: argparse.ArgumentParser, names: tuple[str, str] = ("SRC", "DST")) -> None:
    """Add the arguments that name the blocks of a plan, and the profile and policy that choose its path."""
    parser.add_argument("--blocks", type=block_ids, metavar="IDS", help="of a plan, on both sides: 0,1,4-7")
    for side, name in zip(SIDES, names, strict=True):
        parser.add_argument(f"--{side}", type=block_ids, metavar="IDS", help=f"where {name} has other blocks")
    add_costs(parser)


def add_costs(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name the profile and the policy of predicted times."""
    parser.add_argument("--profile", metavar="NAME", help="whose costs: part of a shipped GPU's name, 'default', or a "
                        "file; by default this GPU's")  # fmt: skip
    parser.add_argument("--overlap", default="idle", metavar="WHAT",
                        help="compute that runs at the same time: idle, decode or prefill")  # fmt: skip


def layout_of(args: argparse.Namespace) -> KVLayout:
    """Read the layout that :func:`add_layout`'s arguments name.

    Raises:
        KVPlanError: it cannot be read, or is not a layout.
    """
    given = {"--sizes": args.sizes, "--dtype": args.dtype, "--device": args.device}
    if _is_file(args.layout):
        _refuse(args.layout, given)
        return _from_file(args.layout)
    return _from_notation(args.layout, args.sizes or {}, args.dtype, args.device)


def file_layout(path: str) -> KVLayout:
    """Read the layout of a file.

    Raises:
        KVPlanError: it cannot be read, or is not a layout.
    """
    return layout_of(argparse.Namespace(layout=path, sizes=None, dtype=None, device=None))


def pair_of(args: argparse.Namespace) -> tuple[KVLayout, KVLayout]:
    """Read the source and destination layouts that :func:`add_pair`'s arguments name.

    A notation beside a file has the file's dtype, unless ``--dtype`` gives another one.

    Raises:
        KVPlanError: one of them cannot be read, or is not a layout.
    """
    if _is_file(args.source) and _is_file(args.destination):
        _refuse(args.source, {"--sizes": args.sizes, "--dtype": args.dtype})
    found: dict[str, KVLayout] = {}
    dtype = args.dtype
    for side, source in sorted((("src", args.source), ("dst", args.destination)), key=lambda one: not _is_file(one[1])):
        found[side] = _one_of_pair(args, source, side, dtype)
        if _is_file(source) and dtype is None and "+" not in found[side].dtype:  # parts of one dtype
            dtype = found[side].dtype
    return found["src"], found["dst"]


def source_of(args: argparse.Namespace) -> KVLayout:
    """Read the source layout that :func:`add_pair`'s arguments name, without a destination.

    Raises:
        KVPlanError: it cannot be read, or is not a layout.
    """
    given = (args.sizes or {}) | (args.src_sizes or {})
    if _is_file(args.source):
        _refuse(args.source, {"--sizes": given or None, "--dtype": args.dtype, "--src-device": args.src_device})
        return _from_file(args.source)
    return _from_notation(args.source, given, args.dtype, args.src_device or args.devices["src"])


def _one_of_pair(args: argparse.Namespace, source: str, side: str, dtype: str | None) -> KVLayout:
    own_sizes, device = getattr(args, f"{side}_sizes"), getattr(args, f"{side}_device")
    if _is_file(source):
        _refuse(source, {f"--{side}-sizes": own_sizes, f"--{side}-device": device})
        return _from_file(source)
    # --sizes is for both notations: a size that only the other notation names is left out here.
    notation = parse(source)
    names = notation.axes | {str(atom) for dim in notation.dims for atom in dim}
    common = {name: extent for name, extent in (args.sizes or {}).items() if name in names}
    return _from_notation(source, common | (own_sizes or {}), dtype, device or args.devices[side])


def _from_file(path: str) -> KVLayout:
    try:
        return KVLayout.from_spec(path)
    except KVPlanError as error:
        if str(Path(path)) not in str(error):  # name the one of two files
            error.args = (bounded(f"{path}: {error}"),)
        raise
    except RecursionError as error:
        raise KVPlanError(f"{path}: nested too deeply; a spec has two levels") from error
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
    return not re.search(r"[\s:(]", source) and Path(source).is_file()  # a notation of one word


def _refuse(source: str, given: dict[str, Any]) -> None:
    for option, value in given.items():
        if value is not None:
            raise KVPlanError(f"{option} goes with a notation; {quoted(source)} is a file, which states its own")


def sizes(text: str) -> dict[str, int]:
    """Read extents by axis.

    >>> sizes("layer=80,head.1=4")
    {'layer': 80, 'head.1': 4}
    """
    extents: dict[str, int] = {}
    for item in text.split(","):
        match = _SIZE.fullmatch(item.strip())
        if match is None:
            raise argparse.ArgumentTypeError(f"{quoted(item)} is not AXIS=EXTENT, as in layer=80,block=1024")
        name, extent = match.groups()
        if name in extents:
            raise argparse.ArgumentTypeError(f"{quoted(name)} is given twice in {quoted(text)}")
        extents[name] = int(extent)
    return extents
