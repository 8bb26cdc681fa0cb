"""Runnable programs, thin over the library."""
