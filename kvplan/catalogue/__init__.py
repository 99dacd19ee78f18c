"""Data: layouts and models of the field by name."""
