"""Benchmarks of planning and host copies, against named baselines and floors measured in the same run.

``python -m benchmarks`` runs them all, prints a table a group and saves JSON; see README.md beside this file.
"""
