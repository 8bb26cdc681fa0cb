"""How much of an array that would be large is made at a time."""

LOGITS_BYTES = 512 * 2**20
"""Most bytes of logits, by default (`meshpar.parallel.head_loss`). For a vocabulary of
128k that is a chunk of 1,024 tokens: enough for its matmuls to be bound by arithmetic,
not by the sum of the table's gradient that each chunk reads and writes."""

SCORE_BYTES = 256 * 2**20
"""Most bytes of attention's fp32 scores (`meshpar.models.layers.causal_attention`),
while heads are many: the softmax and its gradient are arrays of that size beside the
one kept."""

LONGEST_SCORES = 8192
"""Tokens of the longest sequence whose softmax is kept for the backward on one device;
longer ones are attended to in tiles (`meshpar.parallel.context.tiles`), whose memory is
linear in the sequence."""

HIDDEN_BYTES = 512 * 2**20
"""Most bytes of an MLP's hidden values, where its backward makes them again anyway
(`meshpar.parallel.token_chunks`): each matmul's gradient is an array of that size
beside them. At a hidden size of 2 x 12,288 in bf16 that is a chunk of 8,192 tokens:
enough for its matmuls to be bound by arithmetic, not by the weights' fp32 gradient that
each chunk reads and writes."""

TILE_BYTES = 64 * 2**20
"""Most bytes of a tile's fp32 scores, over all heads that a device takes at a time."""
