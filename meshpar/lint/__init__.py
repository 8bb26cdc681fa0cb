"""Lint: what a model, its rules and a layout do to each other, before anything runs."""
