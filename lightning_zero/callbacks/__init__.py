"""Callbacks that report on a sharded run, or average its weights."""

from lightning_zero.callbacks.breakdown import Breakdown
from lightning_zero.callbacks.ema import EMA
from lightning_zero.callbacks.gradient_monitor import GradientMonitor
from lightning_zero.callbacks.memory_report import MemoryReport
from lightning_zero.callbacks.run_report import RunReport
from lightning_zero.callbacks.trace import Trace

__all__ = ["EMA", "Breakdown", "GradientMonitor", "MemoryReport", "RunReport", "Trace"]
