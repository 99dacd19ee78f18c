"""Requests that every engine gets. Their tokens are noted, so that engines can be compared."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

BLOCK = 32  # tokens
SESSIONS, TURNS, ASKED, ANSWERED = 6, 4, 40, 24
GPU_BLOCKS = 64  # fewer than three sessions have
CROWD, CROWD_PROMPT, CROWD_ANSWER = 8, 300, 150
SHARED = 10 * BLOCK  # tokens of a prefix that requests have in common
WAITING, HELD = 5, 8 * BLOCK  # requests at once, and tokens of the prefix of each
CROWD_GPU_BLOCKS = 72  # five whole requests of the crowd

Generate = Callable[[list[list[int]], int], list[Any]]


def tokens(what: str, number: int, count: int) -> list[int]:
    """Tokens that are the same in every process."""
    return random.Random(f"{what} {number}").choices(range(1000), k=count)


def chats(generate: Generate, *, given: bool = False) -> list[dict[str, Any]]:
    """Sessions of several turns, one request at a time; each prompt has the answers before it.

    Every second turn goes backwards through the sessions: the least recently used pool then holds some of them.

    Args:
        generate: the engine.
        given: answers in prompts are given ones, so that a token that differs does not change later prompts.
    """
    said = [tokens("context", k, 500 + 27 * k) for k in range(SESSIONS)]
    found = []
    for turn in range(TURNS):
        for k in range(SESSIONS) if turn % 2 == 0 else reversed(range(SESSIONS)):
            said[k] = said[k] + tokens(f"asked in turn {turn}", k, ASKED)
            (answer,) = generate([said[k]], ANSWERED)
            found.append({"request": f"turn {turn}, session {k}", "prompt": len(said[k]), **answer})
            said[k] = said[k] + (tokens(f"said in turn {turn}", k, ANSWERED) if given else answer["tokens"])
    return found


def given_chats(generate: Generate) -> list[dict[str, Any]]:
    """Chats whose prompts are the same in every engine."""
    return chats(generate, given=True)


def crowd(generate: Generate) -> list[dict[str, Any]]:
    """More requests at once than the cache holds, so that some are preempted; then the same once more."""
    prompts = [tokens("crowd", k, CROWD_PROMPT + 13 * k) for k in range(CROWD)]
    found = []
    for turn in range(2):
        answers = generate(prompts, CROWD_ANSWER)
        found += [{"request": f"turn {turn}, request {k}", "prompt": len(prompts[k]), **answer}
                  for k, answer in enumerate(answers)]  # fmt: skip
    return found


def prefixes(generate: Generate) -> list[dict[str, Any]]:
    """Two prompts that differ in their first token only."""
    prompt = tokens("prefix", 0, 300)
    answers = [generate([[first, *prompt]], ANSWERED)[0] for first in (1, 2)]
    return [{"request": f"first token {k}", "prompt": 301, **answer} for k, answer in enumerate(answers)]


def shared(generate: Generate) -> list[dict[str, Any]]:
    """Two requests at once with one prefix of the host, of which the second has more there, three times."""
    found = []
    for turn in range(3):
        prefix, more = (tokens(what, turn, SHARED) for what in ("shared", "more than shared"))
        generate([prefix + more], 1)
        for k in range(4):  # they take the place of the prefix
            generate([tokens(f"instead, in turn {turn}", k, 600)], 1)
        prompts = [[*prefix, *tokens("asked of the prefix", turn, ASKED)], [*prefix, *more, 1]]
        found += [{"request": f"turn {turn}, request {k}", "prompt": len(prompts[k]), **answer}
                  for k, answer in enumerate(generate(prompts, ANSWERED))]  # fmt: skip
    return found


def queue(generate: Generate) -> list[dict[str, Any]]:
    """Several requests at once, each with a prefix of its own on the host."""
    said = [tokens("queue", k, HELD) for k in range(WAITING)]
    for prompt in said:
        generate([prompt], 1)
    for k in range(4):  # they take the place of the prefixes
        generate([tokens("instead of the queue", k, 600)], 1)
    prompts = [[*prompt, *tokens("asked in the queue", k, ASKED)] for k, prompt in enumerate(said)]
    return [{"request": f"request {k}", "prompt": len(prompts[k]), **answer}
            for k, answer in enumerate(generate(prompts, ANSWERED))]  # fmt: skip


WORKS = {
    "shared": shared,
    "queue": queue,
    "chats": chats,
    "given chats": given_chats,
    "crowd": crowd,
    "prefixes": prefixes,
}
