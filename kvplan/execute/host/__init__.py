"""Copies within CPU memory."""
