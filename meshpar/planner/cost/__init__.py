"""Cost of one layout: bytes, seconds and memory, with the reasons."""
