"""The JSON Schemas in the package: each is valid, and what every command prints validates."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from importlib.resources import files

import pytest
from jsonschema import Draft202012Validator

from kvplan import KVLayout, KVPlanError
from kvplan.cli import doctor, main
from kvplan.cli.main import COMMANDS
from kvplan.cli.screen import SCHEMAS, schema_of
from kvplan.cost import store
from kvplan.cost.profile import default_pair
from kvplan.cuda import machine, peers
from kvplan.cuda.peers import PeerLink
from kvplan.measure import calibrate
from kvplan.measure.doctor import gather
from kvplan.measure.processes import process_bench
from tests.cli.calibrated_machine import H100, MEASURED
from tests.commands import GPU, HOST, HOST_64, SPECS, X_PACKED, answer, document
from tests.measure.bench_rows import rows
from tests.measure.doctor_facts import GPU_LESS, HEALTHY, SEVERAL_GPUS, SLOW, UNREACHABLE

FOLDER = files("kvplan.cli") / "schemas"
THERE = {found.stem for folder in (FOLDER, FOLDER / "calibration") for found in folder.glob("*.json")}
TOKEN_MAJOR, PADDED, WITH_INDEX = (
    str(SPECS / f"{name}.toml") for name in ("host_token_major", "mla_fp8_padded", "mla_with_index")
)


def valid(found):
    """The document, once it is what its schema says; no key it has is left undescribed at the top."""
    name = found["schema"].removeprefix("kvplan.").partition("/")[0]
    schema = schema_of(name)
    errors = [f"{error.json_path}: {error.message[:200]}" for error in Draft202012Validator(schema).iter_errors(found)]
    assert not errors
    assert set(found) <= set(schema["properties"])
    return found


def test_every_document_has_one():
    assert set(SCHEMAS) == THERE
    assert {name.partition("-")[0] for name in COMMANDS} <= set(SCHEMAS)


@pytest.mark.parametrize("name", sorted(THERE))
def test_each_is_valid_and_says_what_its_keys_are(name):
    schema = schema_of(name)
    Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["properties"]["schema"]["const"] == schema["title"] == f"kvplan.{name}/{SCHEMAS[name]}"
    assert schema["description"]
    assert "schema" in schema["required"]


def leaves(schema, path=""):
    for key, one in schema.get("properties", {}).items():
        inner = one.get("items", one)
        if "properties" in inner:
            yield from leaves(inner, f"{path}.{key}")
        elif key != "schema":
            yield f"{path}.{key}", one


@pytest.mark.parametrize("name", sorted(THERE))
def test_every_number_has_its_unit_in_words(name):
    bare = [path for path, one in leaves(schema_of(name)) if not one.get("description") and "enum" not in one]
    assert not bare


def test_a_name_without_one():
    with pytest.raises(KVPlanError, match="'nothing' has no schema; documents are inspect"):
        schema_of("nothing")
    with pytest.raises(KVPlanError, match="has no schema"):
        schema_of("../screen")


@pytest.mark.slow
@pytest.mark.parametrize(
    "argv",
    [
        ("inspect", GPU),
        ("inspect", X_PACKED),
        ("inspect", WITH_INDEX),
        ("inspect", "layer: block dim", "--sizes", "layer=2,block=3,dim=8"),
        ("inspect", "block: layer dim", "--sizes", "layer=2,block=3,dim=8"),
        ("inspect", "--model"),
        ("inspect", "--model", "llama-3.1-70b", "--engine", "vllm", "--tp", "4", "--host", "page-first"),
        ("inspect", "--model", "deepseek-v3.2"),
        ("inspect", "--model", "jamba-v0.1"),
        ("inspect", "--model", "gpt-oss-20b"),
        ("inspect", "--model", "jamba-v0.1", "--peer", "nvlink", "--peer-block-tokens", "64"),
        ("plan", GPU, HOST_64, "--src", "0-10", "--dst", "0,1,3", "--dst-skip", "1"),
        ("explain", GPU, HOST),
        ("explain", "block: layer dim", "layer: block dim", "--sizes", "layer=2,block=3,dim=8"),
        ("explain", GPU, HOST, "--blocks", "0-15", "--profile", "h100"),
        ("explain", HOST, HOST_64, "--src", "0-3", "--dst", "0"),
        ("diff", GPU, HOST),
        ("diff", GPU, TOKEN_MAJOR),
        ("diff", HOST, HOST),
        ("diff", PADDED, PADDED),
        ("diff", WITH_INDEX, WITH_INDEX),
        ("diff", "layer: block dim", "block layer dim", "--sizes", "layer=2,block=3,dim=8"),
        ("advise", GPU),
        ("advise", X_PACKED, "--block-tokens", "64", "--direction", "load"),
        ("advise", GPU, TOKEN_MAJOR),
        ("advise", GPU, HOST),
        ("advise", HOST),
        ("which", "16@0x7f0000002000", GPU),
        ("which", "9000@0x7f0000001ff0", GPU),
        ("verify", GPU, HOST, "--blocks", "1"),
        ("pairs",),
        ("inspect", GPU, "--wire", "push"),
        ("explain", GPU, HOST, "--wire", "rdma"),
        ("explain", HOST, GPU, "--blocks", "0-3", "--wire", "host", "--profile", "h100"),
        ("wires", "--model", "deepseek-v3", "--tokens", "1k"),
        ("backends",),
    ],
    ids=" ".join,
)
def test_what_is_printed_validates(capsys, argv):
    valid(document(capsys, *argv))


def test_a_page_and_a_dump(capsys, tmp_path):
    valid(document(capsys, "report", GPU, "--output", str(tmp_path / "page.html")))
    KVLayout.from_spec(GPU).save(tmp_path / "dump.json")
    valid(json.loads((tmp_path / "dump.json").read_text()))


def test_what_is_no_content(capsys):
    valid(document(capsys, "which", "0x10", GPU, code=1))


def test_a_pair_that_does_not_compile(capsys):
    found = valid(document(capsys, "diff", GPU, X_PACKED, code=1))
    assert found["refused"]
    assert found["program"] is None
    assert main(["explain", GPU, X_PACKED, "--json"]) == 1
    valid(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize(
    "facts",
    [HEALTHY, GPU_LESS, SLOW, SEVERAL_GPUS, UNREACHABLE, None],
    ids=["healthy", "no GPU", "slow", "several GPUs", "no peer access", "this machine"],
)
def test_the_doctor(capsys, monkeypatch, facts):
    if facts is None:
        facts = gather("cuda:0", busy=False)
    monkeypatch.setattr(doctor, "gather", lambda device, *, busy: replace(facts, device=device))
    main(["doctor", "--json"])
    valid(json.loads(capsys.readouterr().out))


def test_calibrate(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(store, "SHIPPED", tmp_path)
    monkeypatch.setattr(machine, "machine", lambda ordinal=0: H100)
    monkeypatch.setattr(calibrate, "calibrate", lambda *given, **told: MEASURED)
    assert main(["calibrate", "--alone", "--json", "--output", str(tmp_path / "a.json")]) == 0
    valid(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize("argv", [("--peer", "cuda:1"), ("--peers",)])
def test_calibrate_pairs(capsys, monkeypatch, tmp_path, argv):
    links = {pair: PeerLink(*pair, reachable, "" if reachable else "a reason", 18) for pair, reachable in (
        ((0, 1), True), ((1, 0), False))}  # fmt: skip
    measured = replace(default_pair(), gpu=H100.gpu, peer=H100.gpu, nvlinks=18, calibrations=1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(store, "SHIPPED", tmp_path)
    monkeypatch.setattr(machine, "machine", lambda ordinal=0: H100)
    monkeypatch.setattr(peers, "links", lambda: tuple(links.values()))
    monkeypatch.setattr(peers, "link_between", lambda *pair: links[pair])
    monkeypatch.setattr(calibrate, "calibrate_pair", lambda *given, **told: measured)
    assert main(["calibrate", "--json", *argv]) == 0
    valid(json.loads(capsys.readouterr().out))


def test_bench(capsys):
    argv = ("bench", "--device", "cpu", "--sizes", "512,4K", "--counts", "16", "--memory", "64K", "--seconds", "600")
    assert main([*argv, "--json"]) in (0, 1)
    found = valid(json.loads(capsys.readouterr().out))
    valid({**found, "rows": [{**asdict(row), "nbytes": row.nbytes} for row in rows()]})


def test_bench_of_two_processes(capsys, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(process_bench, "NOTES", 5)
    argv = ("bench", "--device", "cpu", "--peer", "process", "--sizes", "512", "--memory", "1M", "--seconds", "600")
    assert main([*argv, "--json"]) == 0
    found = valid(json.loads(capsys.readouterr().out))
    assert (found["peer"], found["peer_device"], found["processes"]["transport"]) == ("process", "cpu", "shm")


@pytest.mark.parametrize("engine", ["numpy", "torch"])
def test_demo(capsys, engine):
    if engine == "torch":
        pytest.importorskip("torch")
    answered = main(["demo", "--engine", engine, "--json", "--requests", "3", "--tokens", "48", "--speed-mib", "1"])
    out, _ = capsys.readouterr()
    assert answered == 0
    valid(json.loads(out))


def test_text_is_no_document(capsys):
    with pytest.raises(json.JSONDecodeError):
        json.loads(answer(capsys, "inspect", GPU))
