"""A traced program, read by one walker: dependence, tokens, bytes, splits.

`walk` is the only walker of jaxprs, `primitives` the only list of what is elementwise,
a call or linear. Each other file answers one question with them. Models, layouts and
compiled programs do not enter.
"""
