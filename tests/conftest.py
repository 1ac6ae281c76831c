"""Hypothesis everywhere: no deadlines, as the machine may be busy; in CI the same examples each time."""

import os

from hypothesis import settings

settings.register_profile("laned", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "laned")
