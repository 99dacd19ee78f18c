"""What simulated drivers share: the copy kernel in plain Python, and objects that say they are on a GPU."""
