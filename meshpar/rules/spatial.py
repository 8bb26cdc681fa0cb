"""The logical axes of space, whose neighbouring places are read together."""

SPATIAL = ("depth", "height", "width", "pair_rows", "pair_columns")
"""Of images the second and third, of volumes three; of pairs of residues the last."""
