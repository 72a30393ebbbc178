"""Decisions by their outcome: plans laid out in time, and the search for the best plan."""
