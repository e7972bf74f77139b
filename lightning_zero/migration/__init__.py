"""Configurations of other libraries in the terms of this one, without importing them.

Terms:

- key: a place of the other library's file, as a dotted path such as `zero_optimization.stage`.
- here: what says the same in this package, as a dotted key of its Hydra groups such as `strategy.stage`.
- row: one key of a file with its value, and what became of it (`Status`).

`located` reads JSON and remembers where everything stands; `deepspeed_keys` classifies all keys of DeepSpeed;
`classify` holds a file against them, and `deepspeed` decides what depends on several keys. The standard library
suffices for all of it.
"""

from lightning_zero.migration.deepspeed import import_deepspeed
from lightning_zero.migration.located import MigrationError
from lightning_zero.migration.report import Import, Row, Status

__all__ = ["Import", "MigrationError", "Row", "Status", "import_deepspeed"]
