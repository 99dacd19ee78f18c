"""Executors: they take plans and move the bytes."""
