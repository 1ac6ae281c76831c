"""The daemon's own memory, as the operating system counts it."""

import os
import resource
import sys


def resident_bytes() -> int:
    """Bytes of this process in memory now; where the system tells only the highest so far, as macOS does, that."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
