"""The compiled program of a step: its collectives, each with a reason, and memory.

`report.audit` compiles what `subject.make_subject` finds and explains it; `targets`
compiles for hardware that is absent, `hlo` and `collectives` read XLA's text, `reasons`
asks `needs` and `evidence` why a collective is there, and `overlap` times it beside
matmuls. Nothing here decides a layout or predicts one: that is the planner's.
"""
