"""The arguments of commands: layouts, and values with their units."""
