"""Attention over a sequence that devices share: ring, all-gather or Ulysses.

`attention.shard_attention` computes a device's part, `shards.sharded_attention` moves
keys between devices, `mask` says which keys a query sees, and `splash` calls the TPU's
kernel. The facts of each method are data in `meshpar.layout.context_method`.
"""
