"""Measurements: each program prints what it measured and on what."""
