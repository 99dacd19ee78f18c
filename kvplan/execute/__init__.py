"""Plans in, moved bytes out."""
