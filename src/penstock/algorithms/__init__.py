"""Tuning algorithms, one a file."""
