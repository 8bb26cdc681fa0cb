"""The logical axes of space, whose neighbouring places are read together."""

SPATIAL = ("depth", "height", "width")
"""Of images the last two, of volumes all."""
