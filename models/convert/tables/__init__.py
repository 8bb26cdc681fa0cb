"""A table for each family: their tensors and where they stand in ours, both ways."""
