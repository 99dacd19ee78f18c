"""An answer is a dataclass: its fields make the tables, the JSON document and its schema.

The name of a field carries its unit: ``nbytes`` are bytes, ``seconds`` seconds, ``gbps`` 10^9 bytes a second. The
docstring of a class says what its fields are; the schema repeats it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from importlib import import_module
from inspect import get_annotations, getattr_static
from operator import attrgetter
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Self,
    Union,
    dataclass_transform,
    get_origin,
    get_type_hints,
)
from typing import get_args as arguments_of

from kvplan.base.numbers import between, binary, duration, exact, number_ranges
from kvplan.errors import KVPlanError

# The document of each name, and the class of its answers: the version rises where a key changes its meaning or goes.
DOCUMENTS = {
    "inspect": "layouts:LayoutAnswer", "inspect-model": "catalogue:ModelAnswer", "models": "catalogue:ModelsAnswer",
    "plan": "pair:PlanAnswer", "explain": "pair:ExplainAnswer", "advise": "pair:AdviseAnswer",
    "report": "report:ReportAnswer", "which": "layouts:WhichAnswer", "pairs": "catalogue:PairsAnswer",
    "backends": "machine:BackendsAnswer", "demo": "demo:DemoAnswer", "doctor": "machine:DoctorAnswer",
    "calibrate": "machine:CalibrateAnswer", "calibrate-wire": "machine:WireAnswer", "bench": "machine:BenchAnswer",
    "layout": "layouts:LayoutFile", "finding": "screen:Finding",
}  # fmt: skip
PLAIN = {int: "integer", float: "number", str: "string", bool: "boolean", NoneType: "null"}
LABEL = 30  # characters of a label that is not folded
STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red", "unknown": "dim"}
Tell = Callable[[float | None, str], None]  # of the share done (1 is all, None unknown) and a text


# ---- answers ---------------------------------------------------------------------------------------------------------


class Table(NamedTuple):
    """Rows of words.

    Attributes:
        rows: the cells of each row; of facts, a name and its value.
        header: titles of the columns; none for facts.
        right: columns of numbers, which are aligned on the right.
    """

    rows: Sequence[Sequence[str]]
    header: Sequence[str] = ()
    right: Collection[int] = ()


class Address(int):
    """An address: hexadecimal in words."""

    def __str__(self) -> str:
        return f"{int(self):#x}"


class Number(str):
    """A number in words: a column of them is aligned on the right."""

    __slots__ = ()


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Part:
    """A part of an answer; each subclass is a frozen dataclass.

    A field with its default is absent from the document; a keyword-only field belongs to the screen alone. Facts of the
    rooms below are not annotated again: a class names them (``names``, which also orders all fields) and the classes
    whose attributes they are (``sources``), from which the schema takes types and words. With a "?" one may be null.

    Attributes:
        shown: what tables show, as "name" or "title: name" between commas; by default each field but tables.
    """

    shown: ClassVar[str] = ""
    sources: ClassVar[tuple[type, ...]] = ()
    nullable: ClassVar[set[str]] = set()

    def __init_subclass__(cls, names: str = "", sources: tuple[type, ...] = ()) -> None:
        own, ordered = get_annotations(cls), names.split()
        cls.__annotations__ = {name: own.get(name, "Any") for name in [*(name.rstrip("?") for name in ordered), *own]}
        cls.sources, cls.nullable = sources, {name.rstrip("?") for name in ordered if name[-1] == "?"}
        dataclass(frozen=True)(cls)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __str__(self) -> str:
        return ", ".join(f"{title} {value}" for title, value in facts(self).rows)

    @classmethod
    def of(cls, *sources: object, **more: Any) -> Self:
        """Make it of the attributes of sources that have its fields' names; ``more`` comes first."""
        for name in names_of(cls):
            for source in sources:
                if name not in more and hasattr(source, name):
                    more[name] = getattr(source, name)
        return cls(**more)


class Answer(Part):
    """The answer of a command.

    Attributes:
        schema: name and version of its document.
        status: exit status: 0, or 1 for a finding.
    """

    schema: ClassVar[str]
    status: int = field(default=0, kw_only=True)

    def blocks(self) -> Iterable[Any]:
        """Return the screen, tables and text: the facts, then a table for each field of several parts."""
        values = (getattr(self, name) for name in names_of(type(self)))
        return [facts(self), *(table(value) for value in values if _several(value))]


class Finding(Answer):
    """In place of the document that was asked for: the answer is no.

    Attributes:
        command: the command.
        finding: the reason, in one line.
    """

    schema = "finding/1"
    command: str
    finding: str

    def blocks(self) -> Iterable[Any]:
        """Return nothing: the finding goes to standard error."""
        return []


# ---- tables ----------------------------------------------------------------------------------------------------------


def facts(part: Part) -> Table:
    """Return what is shown as rows of a title and words; what is None, or a table of its own, has no row."""
    rows = ((title, words(name, attrgetter(name)(part))) for title, name in _columns(part, part.shown))
    return Table([row for row in rows if row[1] != "-"])


def table(parts: Iterable[Any], shown: str = "") -> Table:
    """Return a row for each part, with a column for each title."""
    parts = list(parts)
    columns = _columns(parts[0], shown or getattr(parts[0], "shown", ""))
    rows = [[words(name, attrgetter(name)(part), cell=True) for _, name in columns] for part in parts]
    right = {k for k, cells in enumerate(zip(*rows, strict=True)) if any(isinstance(cell, Number) for cell in cells)}
    return Table(rows, [title for title, _ in columns], right)


def _columns(part: Any, shown: str) -> list[tuple[str, str]]:
    names = shown.split(", ") if shown else [name for name in names_of(type(part)) if not _several(getattr(part, name))]
    pairs = (name.rpartition(": ") for name in names)
    return [(title or re.sub(r"\bnbytes\b", "bytes", name.replace("_", " ")), name) for title, _, name in pairs]


def _several(value: Any) -> bool:
    """Return whether a value is a tuple of parts, which is a table."""
    return isinstance(value, tuple) and bool(value) and (is_dataclass(value[0]) or hasattr(value[0], "_fields"))


def words(name: str, value: Any, *, cell: bool = False) -> str:
    """Return a value in words, by its type and the unit in its name.

    >>> words("block_nbytes", 8192), words("block_nbytes", 8192, cell=True), words("seconds", 0.0012)
    ('8,192 bytes (8 KiB)', '8 KiB', '1.2 ms')
    >>> words("layers", (0, 1, 2)), words("parts", ("k", "v"))
    ('3 (0-2)', 'k, v')
    """
    if value is None or isinstance(value, str):
        return "-" if value is None else value
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if name.endswith("seconds") and isinstance(value, float):
        return Number(duration(value))
    if isinstance(value, int | float) and not isinstance(value, Address):
        if name.endswith("nbytes"):
            return Number(binary(round(value))) if cell or isinstance(value, float) else exact(value)
        return Number(f"{value:,}" if isinstance(value, int) else f"{value:,.1f}")
    if name.endswith("nbytes") and isinstance(value, tuple):
        return Number(between(*value) if value[0] != value[1] else binary(value[0]))
    if type(value) in (tuple, range):
        numbers = value and isinstance(value[0], int)
        return f"{len(value):,} ({number_ranges(value, ', ')})" if numbers else ", ".join(map(str, value)) or "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {words(name, item, cell=cell)}" for key, item in value.items())
    return str(value)


def show(blocks: Iterable[Any]) -> None:
    """Print tables and text with empty lines between them. The library rich reads NO_COLOR and COLUMNS."""
    for k, block in enumerate(blocks):
        text = block if isinstance(block, str) else _rendered(block)
        print("\n" * (k > 0) + "\n".join(line.rstrip() for line in text.splitlines()))


def _rendered(block: Any) -> str:
    from rich.console import Console

    console = Console(markup=False, highlight=False, emoji=False)
    with console.capture() as capture:
        console.print(_rich_table(block) if isinstance(block, Table) else block)
    return capture.get()


def _rich_table(block: Table) -> Any:
    from rich import box
    from rich import table as rich

    if not block.header:
        grid = rich.Table.grid(padding=(0, 2))
        columns = max(map(len, block.rows), default=1)
        for k in range(columns):
            last = k == columns - 1
            short = not last and max(len(row[k]) for row in block.rows) <= LABEL
            grid.add_column(style="" if last else "cyan", no_wrap=short, overflow="fold")
        for row in block.rows:
            grid.add_row(*row, style=STYLES.get(row[0]))
        return grid
    made = rich.Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for k, title in enumerate(block.header):
        made.add_column(title, justify="right" if k in block.right else "left", overflow="fold")
    for row in block.rows:
        made.add_row(*row)
    return made


def note(text: str) -> None:
    """Print one line to standard error; it is not part of the answer."""
    print(text, file=sys.stderr)


@contextmanager
def progress(*, silent: bool = False) -> Iterator[Tell]:
    """Show what is done on standard error, if that is a terminal.

    Yields:
        A function that takes the share that is done, and a text.
    """
    if silent or not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.console import Console

    with Console(stderr=True, markup=False).status("starting") as status:
        yield lambda share, text: status.update(text if share is None else f"{share:.0%} {text}")


# ---- documents -------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if hasattr(value, "document"):
        return value.document()
    if is_dataclass(value) or hasattr(value, "_fields"):
        absent = _defaults(type(value)) if isinstance(value, Part | tuple) else {}
        items = ((name, getattr(value, name)) for name in names_of(type(value)))
        return {name: plain(item) for name, item in items if name not in absent or item != absent[name]}
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple | range | list) else value


def json_text(answer: Answer) -> str:
    """Return the document of an answer as one JSON object, its schema first."""
    return json.dumps({"schema": f"kvplan.{answer.schema}", **plain(answer)}, indent=2)


def schema_of(name: str) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a document, from the annotations of its answer.

    Args:
        name: a key of :data:`DOCUMENTS`.

    Raises:
        KVPlanError: there is no document of that name.

    >>> schema_of("plan")["title"]
    'kvplan.plan/1'
    """
    if name not in DOCUMENTS:
        raise KVPlanError(f"{name!r} has no schema; documents are {', '.join(DOCUMENTS)}")
    module, _, kind = DOCUMENTS[name].partition(":")
    answer = getattr(import_module(f"kvplan.cli.{module}"), kind)
    title, body = f"kvplan.{answer.schema}", _described(answer)
    body["required"].insert(0, "schema")
    about = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title,
             "description": answer.__doc__.partition("\n")[0]}  # fmt: skip
    return {**about, **body, "properties": {"schema": {"const": title}, **body["properties"]}}


def _described(kind: Any) -> dict[str, Any]:
    """Return the schema of an annotation."""
    origin, of = get_origin(kind), arguments_of(kind)
    if kind in PLAIN or kind is Address:
        return {"type": PLAIN.get(kind, "integer")}
    if origin is Literal:
        return {"enum": list(of)}
    if origin in (Union, UnionType):
        return {"anyOf": [_described(choice) for choice in of]}
    if origin is tuple and of[-1] is not Ellipsis:
        return {"type": "array", "prefixItems": [_described(item) for item in of], "minItems": len(of)}
    if origin in (tuple, list) or kind is range:
        return {"type": "array", "items": _described(of[0] if of else int)}
    if origin is not None and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _described(of[1])}
    if not (is_dataclass(kind) or hasattr(kind, "_fields")):
        return {}
    properties = {name: _attribute(kind, name) for name in names_of(kind)}
    absent = _defaults(kind) if issubclass(kind, Part | tuple) or hasattr(kind, "document") else ()
    required = [name for name in properties if name not in absent]
    return {"type": "object", "required": required, "properties": properties}


def _attribute(kind: Any, name: str) -> dict[str, Any]:
    """Return the schema of an attribute of a class, or of the source that has it."""
    member, described = getattr_static(kind, name, None), _attribute_words(kind.__doc__ or "").get(name, "")
    getter = getattr(member, "fget", None) or getattr(member, "func", None)
    if getter is not None:
        described = described or (getter.__doc__ or "").partition("\n\n")[0]
    hint = get_type_hints(getter)["return"] if getter is not None else get_type_hints(kind).get(name, Any)
    if hint is not Any:
        return {**_described(hint), "description": " ".join(described.split()) or name.replace("_", " ")}
    for source in getattr(kind, "sources", ()):
        if hasattr(source, name) or name in get_type_hints(source) or name in _attribute_words(source.__doc__ or ""):
            schema = _attribute(source, name)
            described = described or schema["description"]
            nullable = {"anyOf": [schema, {"type": "null"}]} if name in kind.nullable else schema
            return {**nullable, "description": described}
    return {"description": described}


def names_of(kind: Any) -> list[str]:
    """Return the names of the fields of a dataclass or a NamedTuple, without those of the screen."""
    return [*kind._fields] if hasattr(kind, "_fields") else [each.name for each in fields(kind) if not each.kw_only]


def _defaults(kind: Any) -> dict[str, Any]:
    if hasattr(kind, "_fields"):
        return dict(kind._field_defaults)
    return {each.name: each.default for each in fields(kind) if each.default is not MISSING}


def _attribute_words(docstring: str) -> dict[str, str]:
    """Return the words of each attribute under "Attributes:" of a docstring."""
    listed = docstring.partition("Attributes:\n")[2].partition("\n\n")[0]
    entries = (entry.partition(": ") for entry in re.split(r"\n {8}(?=\S)", f"\n{listed}")[1:])
    return {name: " ".join(text.split()) for names, _, text in entries for name in re.split(r",\s+", names)}
