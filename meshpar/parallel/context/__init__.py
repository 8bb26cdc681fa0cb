"""Context parallel: attention over a sequence that the devices share out."""
