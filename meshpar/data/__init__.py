"""Data: from a user's files to rows of tokens, and to batches on devices.

`sources` says where data are, `documents` and `token_cache` turn texts into tokens,
`token_files` and `megatron` read them, `rows` and `batches` feed a step. Nothing here
knows a model or a layout.
"""
