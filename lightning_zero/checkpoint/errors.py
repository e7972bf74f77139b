"""The error of this package's checkpoints."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or is damaged, or ranks do not agree about it."""
