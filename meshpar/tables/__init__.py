"""Embedding tables larger than a device, beside a model under any layout."""

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
