"""The cost model, which chooses the cheapest path for a plan from measured device profiles."""
