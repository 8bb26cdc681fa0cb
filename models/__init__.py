"""Model families in Flax NNX, logical axes only: read, copy, change."""
