"""The `meshpar` command: one file per subcommand."""
