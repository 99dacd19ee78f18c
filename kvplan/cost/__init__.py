"""Which path is the cheapest, by what was measured."""
