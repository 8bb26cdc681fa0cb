"""Calibration: what this machine's devices and links achieve, measured."""
