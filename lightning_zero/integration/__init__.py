"""All that knows Lightning: the strategy, its names, precision, launchers, checkpoints.

It imports nothing by itself, so that ``import lightning_zero`` stays cheap.
"""
