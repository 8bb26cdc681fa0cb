"""Text and tokens from a model under any layout, with a cache.

`generate` runs requests through `engine.Engine`, which serves slots;
`programs.Programs` compiles what the devices do in a step, `paged_cache` keeps keys and
values, and `sampling` draws tokens. Training enters nowhere here.
"""
