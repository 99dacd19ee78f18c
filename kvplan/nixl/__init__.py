"""Transfers between processes, on one machine or two, through NIXL."""

from kvplan.agents.agent import NixlAgent

__all__ = ["NixlAgent"]
