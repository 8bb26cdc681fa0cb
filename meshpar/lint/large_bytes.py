"""How large a parameter may be that is whole on every device."""

LARGE_BYTES = 1 << 20
"""A parameter above this size should not be whole on every device."""
