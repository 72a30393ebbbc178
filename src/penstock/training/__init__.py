"""What trains a bundle: the only part that touches torch."""
