"""Planners: from lengths to bucket shapes."""

from shapebucket.planner.boxes import choose_boxes
from shapebucket.planner.costs import BatchCost, PolynomialCost, TableCost, count_steps
from shapebucket.planner.exact import optimal_boundaries
from shapebucket.planner.plan import plan_buckets

__all__ = [
    "BatchCost",
    "PolynomialCost",
    "TableCost",
    "choose_boxes",
    "count_steps",
    "optimal_boundaries",
    "plan_buckets",
]
