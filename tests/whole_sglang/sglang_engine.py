"""One engine: ``python -m tests.whole_sglang.sglang_engine SETUP ANSWER``, two JSON files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.whole_engines.work import WORKS


def main() -> None:
    """Start an engine, serve works, and write the answers."""
    import sglang

    setup, answer = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    engine = sglang.Engine(**setup["arguments"])

    def generate(prompts: list[list[int]], count: int) -> list[dict[str, Any]]:
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        told = engine.generate(input_ids=prompts, sampling_params=sampling)
        return [{"tokens": one["output_ids"], **cached(one["meta_info"])} for one in told]

    answers = {name: WORKS[name](generate) for name in setup["works"]}
    engine.shutdown()
    answer.write_text(json.dumps(answers))


def cached(facts: dict[str, Any]) -> dict[str, int]:
    """Tokens of a prompt that were cached, and those of them that were loaded from the host."""
    return {"cached": facts["cached_tokens"], "host": (facts.get("cached_tokens_details") or {}).get("host", 0)}


if __name__ == "__main__":
    main()
