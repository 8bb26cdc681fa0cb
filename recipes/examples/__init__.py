"""Models as their authors write them, trained under layouts by `meshpar.from_loss`.

Each module has a model and its loss in the style of one library, and a function
`model(blocks)` with all that meshpar needs to know. Run one under a layout, beside the
plain program of JAX and optax:

    python -m recipes.examples nanogpt_nnx fsdp=4,tensor=2
    python -m recipes.examples nanogpt_nnx data=2,stage=2,microbatches=2 --blocks
"""
