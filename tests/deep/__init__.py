"""Long runs, outside the ordinary tests: `make deep`."""
