"""What holds for all tests, whoever runs them."""

import os
import signal

from hypothesis import settings

# No deadlines, as the machine may be busy; in CI the same examples each time.
settings.register_profile("laned", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "laned")

# What a shell starts in the background ignores ^C and passes that on, to commands that are interrupted here, too.
signal.signal(signal.SIGINT, signal.default_int_handler)
