"""A plan that somebody looks at while it runs."""

from __future__ import annotations

from ..plan import GemmPlan


class WatchedPlan:
    """Stands in for a plan. Subclasses override what they look at; the rest is the plan's."""

    lean = None  # every call comes here

    def __init__(self, plan: GemmPlan):
        self._plan = plan

    def __getattr__(self, name: str):
        return getattr(self._plan, name)
