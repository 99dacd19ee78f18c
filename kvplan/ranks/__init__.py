"""Transfers between ranks of tensor, pipeline and context parallelism, and between groups of layers."""
