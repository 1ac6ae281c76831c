"""Settings of MLX's CUDA backend that decode steps profit from. They are read when MLX starts: imports no MLX.

The backend launches operations in graphs of so many; larger ones cost the host less for each. It keeps the graphs that
it has built, 100 if not told otherwise, which the shapes of a lane exceed: then each launch builds anew. On an H200 a
step of 8 rows of 1,024 tokens of Qwen3-8B's shape took 7.5 to 12 ms without, 6.6 ms with them; 200 and 1,000 operations
to a graph were slower. Of plans for attention it keeps 128, and a new one takes 70 ms (see lanes.tuning).

Of both it counts what it had to build in all its life, and ends the process at twice as many as it keeps, unless it is
told not to: its sources say so, and others' servers have died of it. Whoever serves all kinds of prompts gets there.

Its own kernels are compiled at their first use, seconds each, and kept in files: under /tmp, which a reboot empties and
a service has for itself, if not told otherwise.
"""

import os
from importlib.metadata import version

from lanes.cache_folder import cache_folder

VARIABLES = {
    "MLX_MAX_OPS_PER_BUFFER": "50",
    "MLX_MAX_MB_PER_BUFFER": "100000",
    "MLX_CUDA_GRAPH_CACHE_SIZE": "2000",
    "MLX_CUDA_SDPA_CACHE_SIZE": "2000",
    "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
}


def set_variables() -> None:
    """To be called before MLX is imported, where MLX is its CUDA build. What the user has set stays."""
    # MLX names the files by kernel only.
    kernels = {"MLX_PTX_CACHE_DIR": str(cache_folder("ptx") / version("mlx"))}
    for name, value in (VARIABLES | kernels).items():
        os.environ.setdefault(name, value)
