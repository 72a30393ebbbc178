"""The event log, and what is folded from it."""
