"""The `meshpar` command.

`main` runs a subcommand, which is the file of its name: its options, and what it
prints. `parsing` turns words into values, `options` has the options that several
subcommands share, and `report/` draws. No arithmetic belongs here, and no training:
`meshpar train` is a recipe.
"""
