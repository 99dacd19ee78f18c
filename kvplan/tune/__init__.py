"""Which path is the fastest here: a measured profile of the device, and a model that predicts from it."""
