"""Options of all commands, each with values that it was not made for."""
