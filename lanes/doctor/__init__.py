"""Numeric checks of this machine's backend, by which to decide whether to trust it with a lane.

Most users run backends that no test of ours has run on. A check compares what laned does with the plain way of doing
the same, on tiny models of mlx-lm's own classes, through the code that serves. A new check is a function and a line in
CHECKS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

from lanes.doctor.beside import check_rows
from lanes.doctor.draws import check_draws
from lanes.doctor.forms import check_forms
from lanes.doctor.in_place import check_in_place
from lanes.doctor.models import TINY
from lanes.doctor.quantized import check_quantized
from lanes.doctor.remembered import check_remembered
from lanes.doctor.rope import check_rope
from lanes.doctor.verdict import Verdict, told

CHECKS: dict[str, Callable[[], Iterator[Verdict]]] = {
    "RoPE by a vector of positions": check_rope,
    "products with quantized matrices": check_quantized,
    **{f"rows of {tiny.family} side by side": partial(check_rows, tiny) for tiny in TINY},
    "forms of a step": check_forms,
    "writes in place": check_in_place,
    "draws by seed": check_draws,
    "rows frozen and thawed": check_remembered,
}


def check(name: str) -> list[dict[str, Any]]:
    """Run one of CHECKS: its verdicts as plain data. A check that fails has found something, too."""
    found: list[Verdict] = []
    try:
        found.extend(CHECKS[name]())
    except Exception as error:
        found.append(Verdict(name, "wrong", f"cannot be checked: {told(error)}", "please report it"))
    return [asdict(verdict) for verdict in found]
