"""Transfers between processes, on one machine or two, through NIXL."""

from kvplan.agents.nixl_agent import NixlAgent

__all__ = ["NixlAgent"]
