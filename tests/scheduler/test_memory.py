from __future__ import annotations

import subprocess
import sys

LOOKED_THROUGH = """
import gc
from scheduler.memory import leave_out_of_collection

class Loop:
    def __init__(self): self.me = self

gc.disable()
garbage, kept = Loop(), Loop()
del garbage
leave_out_of_collection()
new = Loop()
found = gc.get_objects()
assert gc.get_freeze_count() > 1000
assert not any(each is kept for each in found)
assert any(each is new for each in found)
gc.unfreeze()
assert sum(type(each) is Loop for each in gc.get_objects()) == 2, "garbage was kept"
"""


def test_what_is_loaded_is_not_looked_through_again() -> None:
    """In a process of its own: tests look for garbage, too."""
    subprocess.run([sys.executable, "-c", LOOKED_THROUGH], check=True)
