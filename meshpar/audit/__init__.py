"""Audit: what the compiler made of a program, per mesh axis."""
