"""How a layout runs a model on devices: the step's program and what it communicates.

`program.LocalProgram` (without stages) and `pipeline/` return loss and gradients. They
are made of `placement` (the model on its mesh), `blocks` and `prefetch` (the loop over
layers), `zero` (parameters split over batch axes) and `reduction` (sums at the end).
Models call `tensor`, `head_loss`, `context/`, `expert/` and `grids/`.
`resharding` moves parameters to another layout; `sizes` has numbers that the planner
shares. No model, optimizer or estimate belongs here.
"""
