"""Devices on a virtual clock."""
