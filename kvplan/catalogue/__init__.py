"""Layouts and models of the field by name, as data."""
