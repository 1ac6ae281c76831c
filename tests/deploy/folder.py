"""The folder deploy/ of this clone, and the laned of this very Python."""

import sys
from pathlib import Path

DEPLOY = Path(__file__).parents[2] / "deploy"
LANED = Path(sys.executable).with_name("laned")
# Where the files of deploy/ have it.
PACKAGED = "/opt/laned/bin/laned"
