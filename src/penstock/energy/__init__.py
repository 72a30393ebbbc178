"""Joules: what they cost, what uses them, and which power limit and batch size need the fewest."""
