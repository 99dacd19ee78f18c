"""The fenced blocks of the documents, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "README.md"])

FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
KINDS = ("python", "python gpu", "python nixl", "python vllm", "console", "toml", "text")

# Commands that are not run, and why; their options are parsed all the same.
NOT_RUN = {
    "kvplan doctor": "its answer and its exit code are the machine's",
    "kvplan calibrate": "needs a GPU, and measures for seconds",
    "kvplan bench": "measures for a minute, best on a GPU",
    "make": "installs packages and runs what CI runs anyway",
    "pip install": "installs packages",
    "python -m benchmarks": "measures",
    "vllm serve": "tests/whole_engines/test_page.py runs it: make test-engines",
    "docker run": "tests/contract/peers/test_containers.py makes the namespaces of two containers",
    "curl": "asks the server of vllm serve; tests/whole_engines/test_page.py does, too",
    "python -m sglang.launch_server": "needs SGLang and a GPU; contract/engines/test_sglang_in_place.py drives it",
    "python examples": "test_examples.py and test_transformers.py run the examples",
}
# Commands of other programs: nothing of theirs can be parsed here.
FOREIGN = ("vllm", "curl", "docker", "git", "KVPLAN_SGLANG=auto", "KVPLAN_LMCACHE=auto")


class Block(NamedTuple):
    """A fenced block of a document."""

    path: Path
    line: int
    kind: str
    body: str


class Command(NamedTuple):
    """A command of a console block: its words without comments, and the answer that is shown; "" where none is."""

    words: tuple[str, ...]
    shown: str
    where: str
    block: Block

    @property
    def not_run(self) -> str | None:
        """Why it is not run."""
        line = " ".join(self.words)
        return next((why for name, why in NOT_RUN.items() if re.search(rf"(^|\s){name}\b", line)), None)


def blocks() -> Iterator[Block]:
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        for found in FENCE.finditer(text):
            indent, kind, body = found.groups()
            lines = [line.removeprefix(indent) for line in body.splitlines(keepends=True)]
            yield Block(path, text.count("\n", 0, found.start()) + 1, kind, "".join(lines))


def commands() -> Iterator[Command]:
    for block in BLOCKS:
        if block.kind == "console":
            for command, shown in re.findall(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", block.body, re.MULTILINE):
                words = shlex.split(command.replace("\\\n", " "), comments=True)
                yield Command(tuple(words), shown, f"{block.path.name}:{block.line}: {' '.join(words)}", block)


BLOCKS = list(blocks())
COMMANDS = list(commands())
