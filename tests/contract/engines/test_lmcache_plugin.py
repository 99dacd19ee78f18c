"""KVPLAN_LMCACHE: LMCache's connectors are kvplan's, whenever LMCache is imported; LMCache is a stand-in here."""

from __future__ import annotations

import logging
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from kvplan.engines import lmcache
from kvplan.engines import lmcache as plugin

pytest.importorskip("torch", reason="LMCache's engines have torch tensors")

Engine = Enum("Engine", ["VLLM", "SGLANG", "TRTLLM"])
ROOT = Path(__file__).parents[3]


class Theirs:
    """LMCache's connector."""

    layout_hints = None

    def batched_from_gpu(self):
        """Its interface."""


@pytest.fixture
def module(monkeypatch):
    """The module that makes connectors."""
    made = ModuleType(plugin.MODULE)
    made.torch_device_type = "cuda"
    made.CreateGPUConnector = lambda config, metadata, engine, layout_hints=None: Theirs()
    monkeypatch.setitem(sys.modules, plugin.MODULE, made)
    monkeypatch.setattr(plugin.log, "handlers", [])
    return made


def config(**more):
    return SimpleNamespace(**{"use_layerwise": False, "enable_blending": False, **more})


def connectors(module, settings, engine=Engine.VLLM):
    return module.CreateGPUConnector(settings, SimpleNamespace(local_worker_id=0), engine)


@pytest.mark.parametrize("engine", [Engine.VLLM, Engine.SGLANG])
def test_connectors_are_kvplans(module, monkeypatch, engine):
    monkeypatch.setenv(plugin.VARIABLE, "auto")
    plugin.plugin()
    plugin.plugin()
    made = connectors(module, config(), engine)
    assert isinstance(made, lmcache.Connector)
    assert isinstance(made.own, Theirs)
    made.executor.close()


def test_on_a_cpu_lmcache_has_no_connector_and_kvplan_has(module, monkeypatch):
    def refuses(*given):
        raise RuntimeError("No supported cpu connector found.")

    module.torch_device_type, module.CreateGPUConnector = "cpu", refuses
    monkeypatch.setenv(plugin.VARIABLE, "auto")
    plugin.plugin()
    made = connectors(module, config())
    assert (made.own, str(made.executor.device)) == (None, "cpu")
    made.executor.close()


@pytest.mark.parametrize(
    ("settings", "engine", "why"),
    [
        ({"use_layerwise": True}, Engine.VLLM, "and not in VLLM with use_layerwise"),
        ({"enable_blending": True}, Engine.VLLM, "and not in VLLM with enable_blending"),
        ({}, Engine.TRTLLM, "kvplan serves it in VLLM and SGLANG, and not in TRTLLM"),
    ],
)
def test_lmcache_keeps_what_kvplan_does_not_serve(module, monkeypatch, caplog, settings, engine, why):
    monkeypatch.setenv(plugin.VARIABLE, "auto")
    plugin.plugin()
    with caplog.at_level(logging.WARNING, "kvplan.engines.lmcache"):
        assert type(connectors(module, config(**settings), engine)) is Theirs
    assert why in caplog.text
