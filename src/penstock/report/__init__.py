"""Tables, pages, exports and live progress for people."""
