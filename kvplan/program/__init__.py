"""Two layouts compiled into a copy program."""
