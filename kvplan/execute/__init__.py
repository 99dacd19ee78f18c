"""Executors, which move the bytes of plans, and their transfers and statistics."""
