"""The contract between a model and every parallel strategy.

`contract.Model` is what a step lays out: declared inputs (`inputs`), parameters with
logical axes (`parameter`), and functions that see a `scope.Scope`. `nnx.from_nnx` makes
one of plain Flax modules; `lora.LoRA` adapts one. No mesh axis is named in this room.
"""
