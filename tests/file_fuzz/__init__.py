"""Files of others, changed at random: every reader takes one or refuses it."""
