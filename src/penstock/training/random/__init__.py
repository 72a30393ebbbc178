"""Random numbers that belong to a trial, and not to the order of training."""
