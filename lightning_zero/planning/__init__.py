"""Memory and traffic of a training, known before it runs."""

from lightning_zero.planning.account import Bytes, Peak
from lightning_zero.planning.plan import BucketPlan, Plan, plan

__all__ = [
    "BucketPlan",
    "Bytes",
    "Peak",
    "Plan",
    "plan",
]
