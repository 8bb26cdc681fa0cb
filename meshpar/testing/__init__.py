"""What test suites of meshpar's users need: a pytest plugin."""
