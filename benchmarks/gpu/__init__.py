"""Benchmarks of the GPU paths, against named baselines and the ceilings of the link measured in the same run.

``python -m benchmarks.gpu`` runs them all, prints a table a group and saves JSON; see README.md one folder up.
"""
