"""Tiny models with random weights of every family that mlx-lm has.

A family is a module of mlx_lm.models, or a variant of one ("llama window") whose config leads elsewhere. CONFIGS has
what differs from facts.COMMON.
"""

from __future__ import annotations

import copy
import importlib
import sys
from types import ModuleType
from typing import Any

import mlx.core as mx

from lanes.doctor.models import randomize
from tests.lanes.families import experts, nested, plain, recurrent, windowed
from tests.lanes.families.facts import COMMON

CONFIGS: dict[str, dict[str, Any]] = dict(
    sorted(
        (name, config)
        for file in (plain, windowed, experts, recurrent, nested)
        for name, config in file.CONFIGS.items()
    )
)

# Families of which no tiny model can be run here, and why.
UNMADE = {
    "bitnet": "needs Metal: its layers are kernels of which there is no other form",
    "muse_spark": "needs Metal: its experts are kernels of which there is no other form",
    "olmo": "cannot process a prompt in this mlx-lm: it adds its mask, which is the word causal, to the scores",
}
FAMILIES = tuple(name for name in CONFIGS if name not in UNMADE)

# What a module looks for when it is imported, and does not use.
_PRESENCE_ONLY = {"olmo": "hf_olmo"}


def module_of(family: str) -> str:
    """The name of the family's module in mlx_lm.models."""
    return family.split()[0]


def import_module(name: str) -> ModuleType:
    wanted = _PRESENCE_ONLY.get(name)
    if wanted is None or wanted in sys.modules:
        return importlib.import_module(f"mlx_lm.models.{name}")
    sys.modules[wanted] = ModuleType(wanted)
    try:
        return importlib.import_module(f"mlx_lm.models.{name}")
    finally:
        del sys.modules[wanted]


def make_model(family: str) -> Any:
    """A model of the family, the same in every process."""
    config = copy.deepcopy(CONFIGS[family])
    module = import_module(module_of(family))
    common = {"model_type": module_of(family), **COMMON}
    if "text_config" in config:
        config["text_config"] = {**common, **config["text_config"]}
    args = module.ModelArgs.from_dict({**common, **config})
    mx.random.seed(7)
    model = module.Model(args)
    model.eval()
    randomize(model)
    return model
