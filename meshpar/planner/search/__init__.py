"""All layouts of a machine, the best of them, and why others are not.

`search.search` estimates `candidates` that `constraints` allow and `bounds` cannot
exclude; `nearest_fit` says what to change if nothing fits.
"""
