"""Optimizers of stacked layers: each layer is updated as a parameter of its own.

`by_layer.by_layer` traces an optimizer on one layer's shapes and runs the trace for all
layers at once. `proof` holds the trace against one in which layers are parameters of
their own. Where optimizer state lies is `meshpar.train.optimizer_state`'s.
"""
