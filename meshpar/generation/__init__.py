"""Generation: tokens of a model under any layout, one at a time, with a cache."""
