"""Decisions by what they lead to: plans laid out in time, and the search for the best."""
