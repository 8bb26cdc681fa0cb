"""Checks of a model before it trains: which examples and tokens does it join?

`examples` tries whether examples depend on one another, `sequences` whether tokens do
(`sequence_probe` executes, `meshpar.trace` names the line), and `batches` compares a
batch with the declared inputs. Nothing here changes or runs a step.
"""
