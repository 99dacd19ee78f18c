"""The commands of docs/start/vllm.md, with a tiny model."""

from __future__ import annotations

import json
import re
import shlex
import sys
import threading

import pytest

from tests.patience import until
from tests.whole_engines import processes, server
from tests.whole_engines.cases import SMALL
from tests.whole_engines.work import BLOCK, GPU_BLOCKS, tokens

pytestmark = [pytest.mark.engines, pytest.mark.slow]

PAGE = processes.ROOT / "docs" / "start" / "vllm.md"
FENCE = re.compile(r"^```([\w ]+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SIZES = {"dtype": "float32", "block_size": BLOCK, "num_gpu_blocks_override": GPU_BLOCKS, "max_model_len": 1024,
         "enforce_eager": True, "max_num_seqs": 8}  # fmt: skip
# oneDNN keeps what it has made for each number of tokens of a step, so that vLLM alone grows by 100 MB in a storm. With
# few numbers, it has made all of them before memory is looked at.
SHORT_STEPS = ["--max-num-batched-tokens", "32"]
CLIENTS, REQUESTS, PROMPTS = 8, 200, 10
ASKED, ANSWERED, UNREAD = 300, 40, 500  # tokens
LEAK = 20 << 20  # bytes; a leaked block of each request would be 26 MB, leaked blocks of a prompt 260 MB
IDLE = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
        "vllm:kv_offload_cpu_cache_usage_perc")  # fmt: skip


def blocks(kind):
    return [body for found, body in FENCE.findall(PAGE.read_text()) if found == kind]


def served(model_folder):
    """The arguments of the page's `vllm serve`, for a tiny model and a small pool."""
    (command,) = [words for body in blocks("console") if (words := shlex.split(body))[:3] == ["$", "vllm", "serve"]]
    _, _, *arguments, config = [model_folder if word == "MODEL" else word for word in command]
    config = json.loads(config)
    config["kv_connector_extra_config"]["cpu_bytes_to_use"] = SMALL
    more = []
    for key, value in SIZES.items():
        more += [f"--{key.replace('_', '-')}", *([] if value is True else [str(value)])]
    return [*arguments, json.dumps(config), *more, *SHORT_STEPS]


def prompt(number):
    return tokens("served", number % PROMPTS, ASKED + 11 * (number % PROMPTS))


def reads_all(number):
    """Whether a client reads its answer to the end."""
    return number // CLIENTS % 2 == 1


def storm(running):
    """Requests of several clients. Half of them hang up: before the answer, or within it."""
    failed = []

    def client(own):
        for number in range(own, REQUESTS, CLIENTS):
            whole = reads_all(number)
            chunks = None if whole else (0, 1, 3, 8)[number % 4]
            try:
                found = running.complete(prompt(7 * number), ANSWERED if whole else UNREAD, chunks=chunks)
                assert len(found) == ANSWERED or not whole
            except Exception as error:  # the thread cannot raise it
                failed.append(f"request {number}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=client, args=(own,), daemon=True) for own in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(processes.LIMIT_S)
        assert not thread.is_alive()
    assert failed == []


def idle(running):
    """Wait until the server has nothing to do, and return its metrics."""

    def at_rest():
        running.complete(prompt(0), 2)  # gauges change in steps
        return all(running.metrics()[name] == 0 for name in IDLE)

    until(at_rest)
    return running.metrics()


def test_a_server_whose_clients_hang_up_leaks_nothing(model_folder, tmp_path, nothing_left):
    with server.running(served(model_folder), tmp_path) as running:
        before = running.complete(prompt(1), ANSWERED)
        storm(running)  # all code has run, and the pool is full
        old = idle(running)
        memory, files = running.resident(), running.open_files()
        storm(running)
        new = idle(running)
        ended = new["vllm:request_success_total length"] - old["vllm:request_success_total length"]
        whole = sum(reads_all(number) for number in range(REQUESTS))
        assert whole <= ended < REQUESTS - (REQUESTS - whole) / 2  # that of `idle` is one of them
        for name in ("vllm:kv_offload_store_bytes_total", "vllm:kv_offload_load_bytes_total"):
            assert new[name] > old[name]
        assert running.resident() - memory < LEAK
        until(lambda: running.open_files() <= files + 1)  # one for the connection that asks
        assert running.complete(prompt(1), ANSWERED) == before
        log = (tmp_path / "log").read_text()
        for line in "".join(blocks("text")).splitlines():
            assert line in log
        for name in re.findall(r"^\| `(vllm:\w+)` ", PAGE.read_text(), re.MULTILINE):
            assert {name, f"{name}_total"} & new.keys()
        assert "kvplan" not in "".join(line for line in log.splitlines() if "ERROR" in line)
        assert running.stop() == 0
        until(lambda: not running.processes())


def test_the_python_of_the_page_makes_an_engine(model_folder, tmp_path, nothing_left):
    (code,) = blocks("python vllm")
    sizes = "".join(f", {key}={value!r}" for key, value in SIZES.items())
    code = code.replace('"MODEL"', repr(model_folder) + sizes).replace("10 << 30", str(SMALL))
    script = tmp_path / "page.py"
    script.write_text(f"{code}\nprint(llm.generate('t1 t2 t3')[0].outputs[0].token_ids)\n")
    script.write_text(f"if __name__ == '__main__':\n{re.sub('(?m)^', '    ', script.read_text())}")
    processes.run([sys.executable, str(script)], tmp_path)
