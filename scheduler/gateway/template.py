"""What requests say to the model's chat template, in the variables that templates have for it."""

from collections.abc import Mapping
from typing import Any

# The answer goes on with the last message, instead of beginning one.
CONTINUE: Mapping[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}


def effort_of(effort: str | None) -> dict[str, Any]:
    """How much to think is a word that some templates take; not at all is one that more of them do."""
    if effort is None:
        return {}
    return {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}
