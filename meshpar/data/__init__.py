"""Data as users have them, from files to rows: each format in a file of its own."""
