"""Planners: from lengths to bucket shapes."""

from shapebucket.planner.boxes import choose_boxes
from shapebucket.planner.exact import optimal_boundaries
from shapebucket.planner.plan import plan_buckets

__all__ = ["choose_boxes", "optimal_boundaries", "plan_buckets"]
