"""What every command prints, held to files: a row is a name and the arguments of ``python -m kvplan``.

A row has two files in ``snapshots/``: ``NAME.txt`` has the exit status, stdout, and stderr (notes); ``NAME.json`` what
``--json`` prints, which must also be what its schema says. After a change that is meant, write them anew with

    KVPLAN_SNAPSHOTS=write python -m pytest -q tests/contract/cli

and read the difference. Commands run in the test's process, in a folder with the files of :func:`files`, at 80
columns and without colours. What differs between machines and versions is masked in :func:`masked`.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import re
import shlex
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

import kvplan
from kvplan.cli import main
from kvplan.cli.screen import schema_of
from tests.commands import hold
from tests.unknown import mla_656, padded_split_kv, token_major

HERE = Path(__file__).parent / "snapshots"
SPECS = Path(__file__).parents[3] / "examples" / "specs"

GPU, HOST, LARGE = "gpu_split_kv.toml", "host_block_first.toml", "host_block_first_64.toml"
TINY = '"layer: kv block token head dim" --sizes layer=1,block=4,token=4,head=2,dim=8'
PAIR = '"layer: kv block token head dim" "block layer kv token head dim" --sizes layer=2,block=8,head=2,dim=8'
SMALL = "--sizes block=4,token=4,head=2,dim=8"
UNEQUAL = f"{PAIR} --src-sizes token=4 --dst-sizes token=8"
EQUAL = f"{PAIR} --src-sizes token=4 --dst-sizes token=4"
ROWS = {
    "inspect": f"inspect {GPU}",
    "inspect-padding": "inspect mla_fp8_padded.toml",
    "inspect-parts": "inspect mla_with_index.toml",
    "inspect-token-major": "inspect host_token_major.toml",
    "inspect-split-axis": "inspect x_packed.toml",
    "inspect-notation": f"inspect {TINY} --dtype int8 --device cuda:1",
    "inspect-opaque": 'inspect "layer: block subblock dim" --sizes layer=2,block=4,subblock=2,dim=64',
    "inspect-looked-up": 'inspect "block: layer kv token head dim" --sizes layer=1,block=4,token=4,head=2,dim=8',
    "inspect-regions": "inspect states.json",
    "inspect-layers": "inspect layers.json",
    "inspect-picture": f"inspect {TINY} --picture",
    "inspect-dump": "inspect padded.json",
    "inspect-model": "inspect --model llama-3.1-70b --engine vllm --tp 4 --host page-first --no-advice",
    "inspect-model-advice": "inspect --model llama-3.1-8b --engine vllm-blocks-first --host page-first-HND",
    "inspect-model-latent": "inspect --model deepseek-v3 --no-advice",
    "inspect-model-rows": "inspect --model deepseek-v3.2 --dtype fp8_ds_mla --no-advice",
    "inspect-model-windows": "inspect --model gemma-3-12b --no-advice",
    "inspect-model-states": "inspect --model jamba-v0.1 --no-advice",
    "inspect-model-compressed": "inspect --model deepseek-v4-flash --no-advice",
    "inspect-model-replicated": "inspect --model qwen3-30b-a3b --tp 8 --host-block-tokens 64 --no-advice",
    "inspect-config": "inspect --config config.json --host-block-tokens 64 --no-advice",
    "inspect-models": "inspect --model",
    "plan": f"plan {EQUAL} --src 0,1,5 --dst 4,2,3",
    "plan-touching": f"plan {EQUAL} --src 0-3 --dst 4-7 --limit 2",
    "plan-skip": f"plan {UNEQUAL} --src 0-2 --dst 5,1 --dst-skip 1 --limit all",
    "plan-cap": f"plan {EQUAL} --src 0 --dst 1 --max-bytes 100 --limit 3",
    "plan-rowless": f"plan {EQUAL} --src 0-7 --dst 0-7 --limit 0",
    "plan-sizes": "plan states.json states.json --src 0 --dst 1",
    "plan-impossible": f"plan {GPU} x_packed.toml --src 0 --dst 0",
    "explain-equal": f"explain {EQUAL} --no-advice",
    "explain-advice": f"explain {GPU} {HOST} --change dst",
    "explain-mended": f'explain "block token head dim" "block token dim" {SMALL} --dst-sizes dim=16',
    "explain-heads": f'explain "block token head dim" "block head token dim" {SMALL} --dst-sizes head=8',
    "explain-other-side": 'explain "layer: block token dim" "(block token) layer dim" --src-device cuda:0 '
    "--dtype uint8 --sizes layer=2,block=3,token=4,dim=8 --change src",
    "explain-parts": "explain latents.json latents_by_token.json",
    "explain-padding": 'explain padded.json "block layer kv token head dim" --dtype uint8 '
    "--dst-sizes layer=2,block=8,token=8,head=2,dim=8",
    "diff": f"diff {GPU} {HOST}",
    "advise": f"advise {GPU}",
    "advise-host": f"advise {GPU} {LARGE}",
    "advise-kinds": "advise kinds.json --block-tokens 8",
    "advise-refused": f'advise "block token head dim" "block token dim" {SMALL} --dst-sizes dim=16',
    "advise-nothing": f'advise "block token head dim" "block token head dim" {SMALL} --dst-sizes head=3',
    "explain-kinds": "explain kinds.json kinds_by_token.json",
    "inspect-kinds": "inspect kinds.json",
    "explain": f"explain {UNEQUAL}",
    "explain-plan": f"explain {GPU} {HOST} --blocks 0-15 --profile h100",
    "explain-layers": f"explain {HOST} {GPU} --blocks 0-63 --profile h200 --by-layer",
    "explain-impossible": f"explain {GPU} x_packed.toml",
    "explain-reinterpret": f"explain {EQUAL} --dtype fp16 --reinterpret",
    "which": f"which 16@0x7f0000002000 {GPU}",
    "which-padding": "which 96@0x7f0000000030 padded.json",
    "which-rows": "which 0x7f0000000290 mla.json",
    "which-layers": "which 96@4096 tokens.json",
    "which-overlay": "which 8@4548 attention.json --overlay state.json",
    "which-many": "which 100000@0x7f0000000010 mla_fp8_padded.toml",
    "which-outside": "which 0x10 padded.json",
    "report": f"report {GPU} {HOST} --output page.html --blocks 0-3 --no-advice --which 16@0x7f0000002000",
    "report-one": f"report {GPU} --output page.html --no-advice",
    "report-impossible": f"report {GPU} x_packed.toml --output page.html --no-advice",
    "pairs": "pairs --device vllm-split-kv",
    "pairs-latent": "pairs --host mla-page-first",
    "pairs-impossible": "pairs --device mla --host page-first",
    "backends": "backends",
    "demo": "demo --engine numpy --requests 2 --tokens 8",
    "bench": "bench --device cpu --sizes 512 --counts 4 --directions load --hosts contiguous --paths host --memory 64K",
    "doctor": "doctor",
    "calibrate": "calibrate",
    "usage": "",
    "usage-option": f"inspect {GPU} --jso",
    "usage-notation": 'inspect "layer: blok dim" --sizes layer=1',
}
MEASURES = ("bench", "doctor", "calibrate")  # this machine
VARY = {
    ("report", "nbytes"),
    ("doctor", "missing"),
}  # of memory here, and of a page that tells of this machine
NARROW = ("inspect", "plan", "explain", "which", "pairs", "backends")  # no line to paste, nor a path
TEXT_ONLY = {"usage", "usage-option"}


def has_gpu() -> bool:
    with contextlib.suppress(OSError):
        return bool(ctypes.CDLL("libcuda.so.1"))
    return False


def masked(text: str, name: str) -> str:
    """What another machine and version would print, too."""
    text = text.replace(str(Path.cwd()), "FOLDER").replace(kvplan.__version__, "VERSION")
    if name == "doctor":  # what is looked at stays; what is found there is this machine's
        looked_at = re.findall(r"^(?:ok|warning|problem) +(\S+(?: \S+)*)  ", text, re.MULTILINE)
        return "".join(f"# {thing}\n" for thing in looked_at)
    if name in MEASURES:
        text = re.sub(r"─+", "─", re.sub(r"\d[\d,.]*", "#", text))
        return "\n".join(" ".join(line.split()) for line in text.splitlines(keepends=False)) + "\n" * bool(text)
    text = re.sub(r"\d+\.\d+ s\b", "# s", text) if name.startswith("demo") else text
    return re.sub(r"[\d,]+ bytes \([\d.]+ \w+\)$", "# bytes", text) if name.startswith("report") else text


def masked_document(value: object, name: str, key: str = "") -> object:
    """The same of a document. Of a machine that is measured, keys stay, and of lists the first item."""
    if key == "seconds" or (name.partition("-")[0], key) in VARY:
        return "#"
    if isinstance(value, dict):
        return {key: masked_document(item, name, key) for key, item in value.items()}
    measured = name in MEASURES and key != "schema"
    if isinstance(value, list):
        if measured:
            return [masked_document(value[0], name)] if value and isinstance(value[0], dict) else "#"
        return [masked_document(item, name) for item in value]
    if isinstance(value, float):
        value = float(f"{value:.6g}")  # the last digits are the libraries'
    return "#" if measured else masked(value, name) if isinstance(value, str) else value


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Specs, dumps and a model's config, in the folder in which commands run."""
    for spec in SPECS.glob("*.toml"):
        (tmp_path / spec.name).write_bytes(spec.read_bytes())
    padded_split_kv().save(tmp_path / "padded.json")
    mla_656().save(tmp_path / "mla.json")
    token_major().save(tmp_path / "tokens.json")
    specs: dict[str, list[dict]] = {"states": [
        {"notation": "block dim", "sizes": {"block": 2, "dim": k}, "dtype": "uint8", "part": "state", "layers": [3 * k],
         "address": 4096 * k, "seams": [4096 * k + 1]} for k in range(1, 11)
    ]}  # fmt: skip
    latents, index = {"layer": 2, "block": 3, "token": 4, "dim": 8}, {"layer": 2, "block": 3, "dim": 8}
    for name, rows, pages in (("latents", "layer: block token dim", "layer: block dim"),
                              ("latents_by_token", "(block token) layer dim", "block layer dim")):  # fmt: skip
        specs[name] = [{"notation": rows, "dtype": "uint8", "sizes": latents},
                       {"notation": pages, "dtype": "uint8", "part": "index", "sizes": index}]  # fmt: skip
    specs["attention"] = [{"notation": "block layer kv token dim", "dtype": "uint8", "address": 4096, "layers": [0, 2],
                           "sizes": {"layer": 2, "block": 6, "token": 4, "dim": 16}}]  # fmt: skip
    specs["state"] = [{"notation": "block dim", "dtype": "uint8", "address": 4096, "part": "state", "strides": [256, 1],
                       "sizes": {"block": 6, "dim": 200}}]  # fmt: skip
    specs["layers"] = [{"notation": "layer block dim", "sizes": {"layer": 3, "block": 2, "dim": 8},
                        "layers": [2, 0, 1]}]  # fmt: skip
    sizes = {"block": 4, "token": 4}  # layers of two head sizes, and an index in one of them
    for name, order in (
        ("kinds", "layer: block kv token head dim"),
        ("kinds_by_token", "layer: block token kv head dim"),
    ):
        specs[name] = [{"notation": order, "layers": layers, "address": k << 30,
                        "sizes": {**sizes, "layer": len(layers), "head": 4 // k, "dim": 8 * k}}
                       for k, layers in ((1, [0, 1, 3]), (2, [2, 4]))]  # fmt: skip
        specs[name].append({"notation": "layer: block token dim", "part": "index", "dtype": "uint8", "layers": [2],
                            "address": 4 << 30, "sizes": {**sizes, "layer": 1, "dim": 16}})  # fmt: skip
    for name, layouts in specs.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(layouts[0] if len(layouts) == 1 else {"layouts": layouts}))
    config = {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 32, "hidden_size": 4096,
              "num_key_value_heads": 8, "torch_dtype": "bfloat16"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    for variable, value in {"NO_COLOR": "1", "COLUMNS": "80", "XDG_CACHE_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(variable, value)
    for variable in ("FORCE_COLOR", "KVPLAN_PROFILE", "KVPLAN_WIRE"):
        monkeypatch.delenv(variable, raising=False)


def run(*arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr."""
    out, notes = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(notes):
        try:
            status = main([*arguments])
        except SystemExit as end:
            status = end.code
    return status, out.getvalue(), notes.getvalue()


@pytest.mark.parametrize("name", ROWS)
def test_text(name, files):
    if name in MEASURES and has_gpu():
        pytest.skip("the snapshot is of a machine without a GPU")
    status, out, notes = run(*shlex.split(ROWS[name]))
    assert status in (0, 1, 2)
    assert "Traceback" not in notes
    assert out if status == 0 else notes or out
    assert not (status == 2 and out), "what is refused has no answer"
    assert shlex.split(f"{ROWS[name]} -")[0] not in NARROW or max(map(len, out.splitlines()), default=0) <= 80
    said = f"exit status {status}\n--- stdout\n{masked(out, name)}--- stderr\n{masked(notes, '')}"
    hold(HERE / f"{name}.txt", said)


@pytest.mark.parametrize("name", [name for name in ROWS if name not in TEXT_ONLY])
def test_json(name, files):
    if name in MEASURES and has_gpu():
        pytest.skip("the snapshot is of a machine without a GPU")
    status, out, _ = run(*shlex.split(ROWS[name]), "--json")
    if status == 2:
        assert not out
        return
    document = json.loads(out)
    errors = Draft202012Validator(schema_of(schema_name(document))).iter_errors(document)
    assert not [f"{error.json_path}: {error.message[:200]}" for error in errors]
    hold(HERE / f"{name}.json", written(masked_document(document, name)))


def written(document: object) -> str:
    """JSON with its innermost lists and objects on a line each, where they fit."""
    text = json.dumps(document, indent=1, ensure_ascii=False)
    for innermost in (r"\[[^\[\]{}]*\]", r"\{[^{}]*\}"):
        text = re.sub(innermost, in_a_line, text)
    return text + "\n"


def in_a_line(found: re.Match[str]) -> str:
    short = re.sub(r"\s*\n\s*", " ", found[0])
    return short if len(short) <= 200 else found[0]


def schema_name(document: dict) -> str:
    """``kvplan.inspect-model/1`` is described by the schema of ``inspect-model``."""
    return document["schema"].removeprefix("kvplan.").partition("/")[0]


def test_every_command_has_a_row_and_every_snapshot_too():
    commands = re.findall(
        r"^    (\w+)", run("--help")[1].partition("COMMAND\n")[2].partition("options:")[0], re.MULTILINE
    )
    there = {shlex.split(row)[0] for row in ROWS.values() if row}
    assert {*commands, "diff"} == there  # that name is told where it went
    assert {file.stem for file in HERE.iterdir()} <= set(ROWS)
