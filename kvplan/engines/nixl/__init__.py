"""Engines that speak NIXL, unchanged: an agent with NIXL's interface that moves bytes within a machine itself.

Source: NIXL 1.5.1 (``nixl._api``), as vLLM 0.33, SGLang 0.5.23 and LMCache 0.5.6 call it.
"""

from __future__ import annotations

from kvplan.engines.nixl.interface import Agent
from kvplan.engines.nixl.switch import install, plugin
from kvplan.engines.nixl.transfers import Telemetry

__all__ = ["Agent", "Telemetry", "install", "plugin"]
