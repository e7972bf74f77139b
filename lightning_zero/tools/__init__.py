"""Tools for checkpoints that need no Trainer: inspect, export, consolidate, convert from DeepSpeed."""
