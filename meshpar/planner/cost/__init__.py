"""What one layout costs: bytes, seconds and memory, and why."""
