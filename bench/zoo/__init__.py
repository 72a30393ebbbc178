"""The models of bench/coverage.py, a module for each family."""
