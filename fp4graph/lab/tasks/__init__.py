"""The tasks of the papers, and small ones that run anywhere."""

from __future__ import annotations

from fp4graph.errors import Error, suggest
from fp4graph.lab.data.loading import Batch
from fp4graph.lab.tasks import classification, diffusion, language, regression, reinforcement
from fp4graph.lab.tasks.task import Problem, Recipe, Settings, Task, placed

__all__ = ["TASKS", "Batch", "Problem", "Recipe", "Settings", "Task", "placed", "task_named"]

#: Every task by name, in the order of ``fp4graph train --list``.
TASKS: dict[str, Task] = {
    task.name: task
    for family in (regression, classification, diffusion, language, reinforcement)
    for task in family.TASKS
}


def task_named(name: str) -> Task:
    """Return the task of that name, or raise an Error that suggests the nearest name."""
    if name not in TASKS:
        raise Error(f"unknown task {name!r}; {suggest(name, TASKS)}")
    return TASKS[name]
