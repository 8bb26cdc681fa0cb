"""Strategies against the model contract, one file each."""
