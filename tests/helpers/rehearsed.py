"""The table of ranks that were rehearsed on a GPU, in docs/recipes.md."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_glm.planner.memory import RESERVE, rank_memory
from megatron_glm.planner.plan import GIB, Plan

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"


def rehearsed(script: str = r"[\w.]+\.sh") -> list[tuple[str, ...]]:
    """Rank, GiB planned, GiB measured of each rank of a recipe, or of all."""
    return re.findall(rf"^\| `{script}` \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", PAGE.read_text(), re.M)


def check_rehearsed(script: str, plan: Plan) -> None:
    """The table has what this plan says, which is within 5 % of what the ranks took."""
    for rank, planned, measured in rehearsed(script):
        place = next(group.index(int(rank)) for group in plan.grid.groups("pp") if int(rank) in group)
        assert planned == f"{(sum(rank_memory(plan, place).values()) - RESERVE) / GIB:.1f}", (script, rank)
        assert abs(float(planned) / float(measured) - 1) < 0.05, (script, rank)
