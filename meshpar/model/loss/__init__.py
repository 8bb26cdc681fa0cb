"""Any loss as a model: a user's pytree and functions, cut between equal blocks."""
