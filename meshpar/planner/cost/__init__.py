"""Answer what one layout of a transformer costs: bytes and seconds, with reasons.

`estimate.estimate` adds up `memory` (bytes), `step_time` (seconds) and `step_traffic`
(bytes sent) of a `run.Run`. A collective is one row of `traffic`, for time, bytes and
bounds alike. The choice among layouts must not enter: it is in `search`.
"""
