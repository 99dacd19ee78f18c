"""Pools of host and GPU memory."""
