"""The contract between a model and every parallel strategy, and ways to meet it."""
