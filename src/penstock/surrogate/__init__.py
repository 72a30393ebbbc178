"""Narrower twins of a model, whose best hyperparameters carry over to it (Hydro §4.1)."""
