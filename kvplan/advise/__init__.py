"""Which order of a host pool's dimensions would be better."""
