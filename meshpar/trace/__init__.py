"""What a traced program does, read by one walker: dependence, tokens, bytes, splits."""
