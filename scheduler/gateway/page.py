"""The chat page: one file of this package."""

from functools import cache
from importlib.resources import files


@cache
def page() -> str:
    return files("scheduler.gateway").joinpath("page.html").read_text(encoding="utf-8")
