"""Layers that the model families share, one file each."""
