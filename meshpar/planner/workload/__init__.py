"""Answer what is trained: sizes, parameters and FLOPs of a transformer.

`shapes.workload_of` makes a `workload.Workload` of a name, of words or of a
`config.json`; `presets.json` has the presets, as their models write it. Machines must
not enter.
"""
