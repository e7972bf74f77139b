"""Tools on checkpoints, without a Trainer: inspect, export, consolidate, convert from DeepSpeed."""
