"""Local steps: replicas that train by themselves and average their parameters.

For devices whose link between the parts of `data` is slow, as between sites. Each part
holds a whole replica, with parameters and optimizer state of its own, and takes
`sync_every` = H steps on its share of each batch. Nothing crosses `data` meanwhile.
Then all take the step of an outer optimizer from where they started together, `start`:

    outer gradient = start - mean over replicas of their parameters
    start = outer optimizer(start, outer gradient)

which is one all-reduce of the parameters in fp32 in H steps, instead of one of the
gradients in each. All replicas go on from `start`; their optimizer states stay theirs.
A model's own state, of each replica's share of the batch, is averaged too.

With H = 1 a layout is plain data parallel, whose gradients are averaged before the
optimizer sees them, and there is no outer optimizer: the program is the same one. (The
formula above with H = 1 is another algorithm for any inner optimizer but SGD, whose
step is linear in the gradient; with an outer SGD of rate 1 it is then the same.)

Reference: Douillard et al. 2023, DiLoCo: Distributed Low-Communication Training of
Language Models, algorithm 1; outer optimizer of its section 3.
"""
