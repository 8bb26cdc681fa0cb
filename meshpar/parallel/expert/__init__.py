"""Experts on several devices: rows sent to them, multiplied, and sent back.

`experts.routed_mlp` is what models call; `rounds` repeats the exchange until every row
has been sent, and `tiles` multiplies rows of many experts at once. Routing is the
model's.
"""
