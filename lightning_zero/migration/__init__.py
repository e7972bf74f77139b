"""Configurations of other libraries in the terms of this one, without importing them.

Terms:

- key: a setting of the other library's file, as a dotted path such as `zero_optimization.stage`.
- here: the corresponding setting of this package, as a dotted key of its Hydra groups such as `strategy.stage`.
- row: one key of a file with its value, and the result of its translation (`Status`).

`located` reads JSON and remembers the position of every value. `deepspeed_keys` classifies all keys of DeepSpeed.
`classify` compares a file with this table, and `deepspeed` translates settings that depend on several keys. All of it
needs only the standard library.
"""

from lightning_zero.migration.deepspeed import import_deepspeed
from lightning_zero.migration.located import MigrationError
from lightning_zero.migration.report import Import, Row, Status

__all__ = ["Import", "MigrationError", "Row", "Status", "import_deepspeed"]
