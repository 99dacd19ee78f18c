"""The parts of a calibration: the transfers that it measures, and the fit of costs to their times."""
