"""An extension of griffe, which reads docstrings for the site: roles, examples and tables as Markdown has them."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from griffe import Attribute, Class, Extension, Function, NameResolutionError, Object

ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`(~?)([\w.]+)`")
EXAMPLE = re.compile(r"(?:^ *>>> .*\n(?:^ *\S.*\n?)*)+", re.MULTILINE)
SHARED = re.compile(r"^( +)(\w+(?:, \w+)+): (.*\n(?:\1 +.*\n)*)", re.MULTILINE)
TABLE = re.compile(r"^(=+(?: +=+)+)\n(?:(.+)\n\1\n)?((?:.+\n)+?)\1$", re.MULTILINE)


class Docstrings(Extension):
    """Rewrites each docstring before it is parsed; a method of `cached_property` is an attribute."""

    def on_class(self, *, cls: Class, **_: Any) -> None:
        """Put an attribute in the place of each such method."""
        for name, member in list(cls.members.items()):
            if isinstance(member, Function) and any("cached_property" in str(line.value) for line in member.decorators):
                places = {"lineno": member.lineno, "endlineno": member.endlineno}
                attribute = Attribute(name, annotation=member.returns, docstring=member.docstring, **places)
                attribute.labels.add("property")
                cls.set_member(name, attribute)

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value, partial(full_path, obj))


def full_path(obj: Object, target: str) -> str:
    """The path of a name as the object's docstring uses it: a member, or a name of its module."""
    first, _, rest = target.partition(".")
    try:
        return ".".join(filter(None, [obj.resolve(first), rest]))
    except NameResolutionError:
        return target


def markdown(text: str, path_of: Callable[[str], str]) -> str:
    """A docstring as Markdown; `path_of` finds the full path of a name in it.

    Roles become links where their target is in the site. An entry of two arguments becomes two entries. Examples
    become code blocks, and simple tables of reStructuredText become tables.
    """
    text = ROLE.sub(lambda role: link(role[2], path_of, short=bool(role[1])), text)
    text = SHARED.sub(lambda line: "".join(f"{line[1]}{name}: {line[3]}" for name in line[2].split(", ")), text)
    text = EXAMPLE.sub(lambda example: fenced(example[0]), text)
    return TABLE.sub(lambda table: piped(table[1], table[2] or "", table[3]), text)


def link(target: str, path_of: Callable[[str], str], *, short: bool) -> str:
    """A name as code, which leads to its entry if there is one."""
    shown = target.rpartition(".")[2] if short else target
    full = target if target.startswith("kvplan.") else path_of(target)
    return f'<autoref optional identifier="{full}"><code>{shown}</code></autoref>'


def fenced(example: str) -> str:
    """An example in a fence, at its own indentation."""
    indent = " " * (len(example) - len(example.lstrip(" ")))
    return f"\n{indent}```pycon\n{example.rstrip()}\n{indent}```\n"


def piped(rule: str, head: str, body: str) -> str:
    """A simple table as a table of Markdown."""
    starts = [column.start() for column in re.finditer("=+", rule)]
    spans = list(zip(starts, [*starts[1:], None], strict=True))

    def row(line: str) -> str:
        return "| " + " | ".join(line[start:end].strip().replace("|", "\\|") for start, end in spans) + " |"

    return "\n".join([row(head), "|" + " --- |" * len(spans), *map(row, body.splitlines())])
