"""Callbacks that show what a sharded run does."""

from lightning_zero.callbacks.gradient_monitor import GradientMonitor

__all__ = ["GradientMonitor"]
