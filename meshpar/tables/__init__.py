"""Embedding tables larger than a device, with a model under any layout.

`tables.embedding_tables` declares tables, `placement` says where they lie, `stores` are
their arrays, and `step.with_tables` adds them to a training step: `exchange` sends ids
and rows, `lookup` is a device's work, `portable` saves. The dense model's step is
`meshpar.train`'s.
"""

from meshpar.tables.optimizers import SGD, LazyAdam, RowwiseAdagrad
from meshpar.tables.placement import Placements
from meshpar.tables.step import TableStep, with_tables
from meshpar.tables.table import Table
from meshpar.tables.tables import EmbeddingTables, embedding_tables

__all__ = [
    "EmbeddingTables",
    "LazyAdam",
    "Placements",
    "RowwiseAdagrad",
    "SGD",
    "Table",
    "TableStep",
    "embedding_tables",
    "with_tables",
]
