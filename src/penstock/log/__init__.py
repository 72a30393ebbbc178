"""The event log, and its folds: history, states, timeline, changes."""
