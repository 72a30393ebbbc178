"""Many trials as one model."""
