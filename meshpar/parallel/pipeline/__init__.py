"""Pipeline parallel: stages on ranks, microbatches through them, in one program."""
