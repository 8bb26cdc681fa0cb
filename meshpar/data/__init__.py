"""Data: from a user's files to rows of tokens, and to batches on devices.

`sources` says where data are, `documents` and `tokenizer` turn texts into tokens,
`token_files` and `megatron` read them, `batches` feeds a step. Nothing here knows a
model or a layout.
"""
