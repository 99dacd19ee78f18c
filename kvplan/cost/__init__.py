"""The cost model: it finds the cheapest path of a plan, from measurements."""
