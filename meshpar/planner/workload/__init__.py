"""Workloads of models: sizes, FLOPs, activations."""
