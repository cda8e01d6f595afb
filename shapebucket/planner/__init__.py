"""Planners: from lengths to bucket shapes."""

from shapebucket.planner.exact import optimal_boundaries
from shapebucket.planner.merge import merge_boxes
from shapebucket.planner.plan import plan_buckets

__all__ = ["merge_boxes", "optimal_boundaries", "plan_buckets"]
