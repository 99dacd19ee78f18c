"""An answer is a dataclass: its fields make the tables, the JSON document and its schema.

The name of a field carries its unit: ``nbytes`` are bytes, ``seconds`` seconds, ``gbps`` 10^9 bytes a second. The
docstring of a class says what its fields are; the schema repeats it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
    "plan": "pair:PlanAnswer", "explain": "pair:ExplainAnswer", "advise": "advise:AdviseAnswer",
    "report": "report:ReportAnswer", "which": "layouts:WhichAnswer", "pairs": "catalogue:PairsAnswer",
    "backends": "machine:BackendsAnswer", "demo": "demo:DemoAnswer", "doctor": "machine:DoctorAnswer",
    "calibrate": "machine:CalibrateAnswer", "calibrate-wire": "machine:WireAnswer", "bench": "bench:BenchAnswer",
    "layout": "layouts:LayoutFile", "finding": "answer:Finding",
}  # fmt: skip
PLAIN = {int: "integer", float: "number", str: "string", bool: "boolean", NoneType: "null"}


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


# What a table shows: names of attributes, "name" or "title: name" between commas; or by title, a name or a function.
Shown = str | Mapping[str, str | Callable[[Any], Any]]


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Part:
    """A part of an answer; each subclass is a frozen dataclass.

    A field with its default is absent from the document; a keyword-only field belongs to the screen alone. Facts of the
    rooms below are not annotated again: a class names them (``names``, which also orders all fields) and the classes
    whose attributes they are (``sources``), from which the schema takes types and words. With a "?" one may be null.

    Attributes:
        shown: what tables show; by default each field, with the unit and the title that its name has.
    """

    shown: ClassVar[Shown] = ""
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
        return ", ".join(f"{title} {said}" for title, said in facts(self).rows)

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
        fields = ((name, getattr(self, name)) for name in names_of(type(self)))
        return [facts(self), *(table(value) for name, value in fields if _several(value))]


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


def facts(part: Part) -> Table:
    """Return what is shown as rows of a title and words; what is None, or a table of its own, has no row."""
    columns = _columns(part, part.shown)
    return Table([row for row in zip(columns, _cells(part, columns), strict=True) if row[1] != "-"])


def table(parts: Iterable[Any], shown: Shown = "") -> Table:
    """Return a row for each part, with a column for each title. Of two columns with one title, one ends in a blank."""
    parts = list(parts)
    columns = _columns(parts[0], shown or getattr(parts[0], "shown", ""))
    rows = [list(_cells(part, columns, cell=True)) for part in parts]
    right = {k for k, cells in enumerate(zip(*rows, strict=True)) if any(isinstance(cell, Number) for cell in cells)}
    return Table(rows, [title.strip() for title in columns], right)


def _columns(part: Any, shown: Shown) -> Mapping[str, Any]:
    if not isinstance(shown, str):
        return shown
    names = shown.split(", ") if shown else [name for name in names_of(type(part)) if not _several(getattr(part, name))]
    pairs = (name.rpartition(": ") for name in names)
    return {
        title or re.sub(r"\bnbytes\b", "bytes", name.rpartition(".")[2].replace("_", " ")): name
        for title, _, name in pairs
    }


def _several(value: Any) -> bool:
    """Return whether a value is a tuple of parts, which is a table."""
    return isinstance(value, tuple) and bool(value) and (is_dataclass(value[0]) or hasattr(value[0], "_fields"))


def _cells(part: Any, shown: Mapping[str, Any], *, cell: bool = False) -> Iterator[str]:
    for get in shown.values():
        yield words("", get(part), cell=cell) if callable(get) else words(get, attrgetter(get)(part), cell=cell)


def words(name: str, value: Any, *, cell: bool = False) -> str:
    """Return a value in words, by its type and the unit in its name.

    >>> words("block_nbytes", 8192), words("block_nbytes", 8192, cell=True), words("seconds", 0.0012)
    ('8,192 bytes (8 KiB)', '8 KiB', '1.2 ms')
    >>> words("layers", (0, 1, 2)), words("parts", ("k", "v"))
    ('3 (0-2)', 'k, v')
    """
    if value is None or isinstance(value, str):
        return value or ("-" if value is None else "")
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
        return ", ".join(f"{key} {words(name, one, cell=cell)}" for key, one in value.items())
    return str(value)


def plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if hasattr(value, "document"):
        return value.document()
    if isinstance(value, Part) or hasattr(value, "_fields"):
        defaults = _defaults(type(value))
        held = {name: getattr(value, name) for name in names_of(type(value))}
        return {name: plain(one) for name, one in held.items() if name not in defaults or one != defaults[name]}
    if is_dataclass(value):
        return {name: plain(getattr(value, name)) for name in names_of(type(value))}
    if isinstance(value, Mapping):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, tuple | range | list) else value


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
    if kind in PLAIN:
        return {"type": PLAIN[kind]}
    if kind is Address:
        return {"type": "integer"}
    if origin is Literal:
        return {"enum": list(of)}
    if origin in (Union, UnionType):
        return {"anyOf": [_described(one) for one in of]}
    if origin is tuple and of[-1] is not Ellipsis:
        return {"type": "array", "prefixItems": [_described(one) for one in of], "minItems": len(of)}
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
    hints, said = get_type_hints(kind), _said(kind.__doc__ or "").get(name, "")
    member = getattr_static(kind, name, None)
    getter = getattr(member, "fget", None) or getattr(member, "func", None)
    if getter is not None:
        said, hint = said or (getter.__doc__ or "").partition("\n\n")[0], get_type_hints(getter)["return"]
    else:
        hint = hints.get(name, Any)
    if hint is not Any:
        return {**_described(hint), "description": " ".join(said.split()) or name.replace("_", " ")}
    for source in getattr(kind, "sources", ()):
        if hasattr(source, name) or name in get_type_hints(source) or name in _said(source.__doc__ or ""):
            found = {**_attribute(source, name), **({"description": said} if said else {})}
            said = found.pop("description")
            return {**({"anyOf": [found, {"type": "null"}]} if name in kind.nullable else found), "description": said}
    return {"description": said}


def names_of(kind: Any) -> list[str]:
    """Return the names of the fields of a dataclass or a NamedTuple, without those of the screen."""
    return [*kind._fields] if hasattr(kind, "_fields") else [one.name for one in fields(kind) if not one.kw_only]


def _defaults(kind: Any) -> dict[str, Any]:
    if hasattr(kind, "_fields"):
        return dict(kind._field_defaults)
    return {one.name: one.default for one in fields(kind) if one.default is not MISSING}


def _said(docstring: str) -> dict[str, str]:
    """Return the words of each attribute under "Attributes:" of a docstring."""
    listed = docstring.partition("Attributes:\n")[2].partition("\n\n")[0]
    said: dict[str, str] = {}
    for entry in re.split(r"\n {8}(?=\S)", f"\n{listed}")[1:]:
        names, _, text = entry.partition(": ")
        said |= dict.fromkeys(re.split(r",\s+", names), " ".join(text.split()))
    return said
