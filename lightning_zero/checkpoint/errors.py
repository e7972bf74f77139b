"""The error of this package's checkpoints."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read, or turned into what was asked for; says what to do."""
