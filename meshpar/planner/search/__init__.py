"""All layouts of a machine, the best of them, and why others are not.

`search.search` estimates the layouts of `space` that `bounds` cannot exclude, `choices`
completes a mesh, `candidates` says why one is rejected, and `remedies` what to change
if nothing fits.
"""
