"""Transfers between tensor-parallel and pipeline-parallel ranks, and between groups of layers."""
