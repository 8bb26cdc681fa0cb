"""Expert parallelism: rows sent to their experts, multiplied in tiles, sent back."""
