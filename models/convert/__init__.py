"""Other projects' model formats, in and out."""
