"""Facts about traced programs, from one walker: dependence, tokens, bytes, splits."""
