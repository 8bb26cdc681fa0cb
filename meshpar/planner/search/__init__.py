"""The layouts of a machine, the best of them, and why others are not."""
