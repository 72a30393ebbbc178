"""Who gets how much, where, with whom: pure functions of what is known."""
