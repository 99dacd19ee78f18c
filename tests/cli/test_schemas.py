"""The JSON Schemas of answers: each is valid, and what every command prints validates."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from jsonschema import Draft202012Validator

from kvplan.cli import machine as commands
from kvplan.cli import main
from kvplan.cli.screen import DOCUMENTS, schema_of
from kvplan.measure import processes
from kvplan.measure.doctor import gather
from tests.measure.doctor_facts import GPU_LESS, HEALTHY, SEVERAL_GPUS, SLOW, UNREACHABLE


def valid(found):
    """The document, once it is what its schema says; no key it has is left undescribed at the top."""
    name = found["schema"].removeprefix("kvplan.").partition("/")[0]
    schema = schema_of(name)
    errors = [f"{error.json_path}: {error.message[:200]}" for error in Draft202012Validator(schema).iter_errors(found)]
    assert not errors
    assert set(found) <= set(schema["properties"])
    return found


@pytest.mark.parametrize("name", sorted(DOCUMENTS))
def test_each_is_valid_and_says_what_its_keys_are(name):
    schema = schema_of(name)
    Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["properties"]["schema"]["const"] == schema["title"]
    assert schema["title"].startswith(f"kvplan.{name}/")
    assert schema["description"]
    assert "schema" in schema["required"]
    bare = [path for path, one in keys(schema) if not one.get("description") and path != ".schema"]
    assert not bare


def keys(schema, path=""):
    """Each key of a schema, however deep."""
    for key, one in schema.get("properties", {}).items():
        yield f"{path}.{key}", one
        yield from keys(one, f"{path}.{key}")
    for inner in (*schema.get("anyOf", ()), schema.get("items", {}), schema.get("additionalProperties", {})):
        if inner:
            yield from keys(inner, path)


@pytest.mark.parametrize(
    "facts",
    [HEALTHY, GPU_LESS, SLOW, SEVERAL_GPUS, UNREACHABLE, None],
    ids=["healthy", "no GPU", "slow", "several GPUs", "no peer access", "this machine"],
)
def test_the_doctor(capsys, monkeypatch, facts):
    if facts is None:
        facts = gather("cuda:0", busy=False)
    monkeypatch.setattr(commands, "gather", lambda device, *, busy: replace(facts, device=device))
    main(["doctor", "--json"])
    valid(json.loads(capsys.readouterr().out))


def test_bench_of_two_processes(capsys, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(processes, "NOTES", 5)
    argv = ("bench", "--device", "cpu", "--peer", "process", "--sizes", "512", "--memory", "1M", "--seconds", "600")
    assert main([*argv, "--json"]) == 0
    found = valid(json.loads(capsys.readouterr().out))
    assert (found["peer"], found["peer_device"], found["processes"]["transport"]) == ("process", "cpu", "shm")
