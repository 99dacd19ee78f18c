"""Layouts of engines and geometries of models by name, as data."""
