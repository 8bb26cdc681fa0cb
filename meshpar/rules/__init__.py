"""Rules: the mesh axes that a logical axis is split over.

`rules.Rules` turns logical axes into specs and explains what it refuses,
`presets.default_rules` has those of each layout, and `sharding` lays out trees. A model
is nothing but logical axes and shapes here.
"""
