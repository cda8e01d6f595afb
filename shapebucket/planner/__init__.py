"""Planners: from lengths to bucket shapes."""

from shapebucket.planner.boxes import solve_boxes
from shapebucket.planner.costs import BatchCost, PolynomialCost, TableCost, count_steps
from shapebucket.planner.exact import optimal_boundaries, solve_boundaries
from shapebucket.planner.measured import MeasuredCost
from shapebucket.planner.plan import plan_buckets
from shapebucket.planner.rules import Rule, from_tf_boundaries, plan_by_rule, plan_from_tf_boundaries, to_tf_boundaries

__all__ = [
    "BatchCost",
    "MeasuredCost",
    "PolynomialCost",
    "Rule",
    "TableCost",
    "count_steps",
    "from_tf_boundaries",
    "optimal_boundaries",
    "plan_buckets",
    "plan_by_rule",
    "plan_from_tf_boundaries",
    "solve_boundaries",
    "solve_boxes",
    "to_tf_boundaries",
]
