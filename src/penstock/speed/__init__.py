"""How fast trials train: what was measured, and what follows from it."""
