"""Build a self-contained HTML page of text, tables and pictures, which users attach to an issue."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Collection, Iterable, Sequence
from html import escape

STYLE = """
:root{color-scheme:light dark;--ink:#1b1b1b;--faint:#5a5a5a;--page:#fff;--rule:#d5d5d5;--sheet:#f6f6f6;--mark:#0058a3}
@media(prefers-color-scheme:dark){:root{--ink:#ececec;--faint:#a8a8a8;--page:#161616;--rule:#3c3c3c;--sheet:#202020;
--mark:#6db8f0}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);margin:2rem auto;max-width:64rem;
padding:0 1rem}
h1{font-size:1.5rem;margin:0 0 .25rem}h2{font-size:1.15rem;margin:2.25rem 0 .5rem;border-bottom:1px solid var(--rule)}
p.about{color:var(--faint);margin:0 0 1.5rem}nav a{margin-right:1rem;color:var(--mark)}
table{border-collapse:collapse;margin:.5rem 0}td,th{padding:.15rem .9rem .15rem 0;text-align:left;vertical-align:top}
th{color:var(--faint);font-weight:500}td{white-space:pre-wrap}td.number{text-align:right;font-variant-numeric:tabular-nums}
pre{font:13px/1.45 ui-monospace,monospace;background:var(--sheet);padding:.75rem 1rem;overflow-x:auto;border-radius:4px}
figure{margin:.75rem 0;overflow-x:auto}img{width:100%;min-width:48rem;height:auto}
h3{font-size:1rem;margin:1rem 0 .25rem}
@media print{nav{display:none}img{min-width:0}}
""".strip()


def page(title: str, about: str, sections: dict[str, str]) -> str:
    """Return the whole page as HTML; it begins with links to its sections.

    Args:
        title, about: title and introduction, as plain text.
        sections: by its title in plain text, the content of each section as HTML.

    >>> html = page("A < B", "today", {"Facts": text("1 & 2")})
    >>> html.startswith("<!doctype html>"), "A &lt; B" in html, "<pre>1 &amp; 2</pre>" in html, "http" in html
    (True, True, True, False)
    """
    links = " ".join(f'<a href="#part-{k}">{escape(name)}</a>' for k, name in enumerate(sections))
    parts = "\n".join(
        f'<section id="part-{k}"><h2>{escape(name)}</h2>\n{body}\n</section>'
        for k, (name, body) in enumerate(sections.items())
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style></head>\n<body>\n<h1>{escape(title)}</h1>\n"
        f'<p class="about">{escape(about)}</p>\n<nav>{links}</nav>\n{parts}\n</body></html>\n'
    )


def text(content: str) -> str:
    """Return text as HTML that keeps its spaces and line breaks."""
    return f"<pre>{escape(content)}</pre>"


def table(rows: Iterable[Sequence[str]], header: Sequence[str] = (), right: Collection[int] = ()) -> str:
    """Return cells of plain text as an HTML table.

    Args:
        rows: the cells of each row.
        header: names of the columns; if there are none, the first cell of each row is its header.
        right: indices of the columns that hold numbers, which are aligned right.

    >>> table([("blocks", "4")])
    '<table><tr><th>blocks</th><td>4</td></tr></table>'
    """
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in header)] if header else []
    for row in rows:
        tags = ["th" if not (header or k) else 'td class="number"' if k in right else "td" for k in range(len(row))]
        lines.append("".join(f"<{tag}>{escape(cell)}</{tag[:2]}>" for tag, cell in zip(tags, row, strict=True)))
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def figure(svg: str, alt: str) -> str:
    """Return an HTML image of a picture. As an image, its styles and names do not affect the page."""
    data = b64encode(svg.encode()).decode()
    return f'<figure><img alt="{escape(alt)}" src="data:image/svg+xml;base64,{data}"></figure>'
