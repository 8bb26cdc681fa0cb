"""Attention over a sequence that devices share: ring, all-gather or Ulysses.

`attention.shard_attention` computes a device's part, `shards.attention_of_shards` runs
it on all, `mask` says which keys a query sees, and `splash` calls the TPU's kernel. The
facts of each method (what divides, what it sends) are data in
`meshpar.attention_method`.
"""
