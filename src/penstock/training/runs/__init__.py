"""What a worker does with a bundle, one file a mode."""
