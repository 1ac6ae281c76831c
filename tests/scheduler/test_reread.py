"""What a running daemon takes of new options, and what it says of the rest."""

from dataclasses import replace

import pytest

from scheduler.option import Option
from scheduler.options import OPTIONS, Options
from scheduler.reread import reread
from tests.scheduler.test_options import EXAMPLES

RUNNING = Options(model="demo")


def test_nothing_new_is_nothing() -> None:
    change = reread(RUNNING, Options(model="demo"))
    assert (change.options, change.taken, change.refused) == (RUNNING, (), ())


def test_what_can_be_taken_is_and_the_rest_stays() -> None:
    change = reread(RUNNING, replace(RUNNING, temperature=0.7, max_rows=8, log_level="debug", log_prompts=True))
    assert change.options == replace(RUNNING, temperature=0.7, log_level="debug", log_prompts=True)
    assert change.taken == (
        "--temperature is 0.7 now, and was 0",
        "--log-level is debug now, and was info",
        "--log-prompts is on now, and was off",
    )
    assert change.refused == ("--max-rows stays 32: 8 takes a restart",)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_each_option_is_either_taken_or_refused(option: Option) -> None:
    values = [True, False] if isinstance(option.default, bool) else [value for _, value in EXAMPLES[option.name]]
    old, new = values
    running = replace(RUNNING, **{option.field: old})
    change = reread(running, replace(RUNNING, **{option.field: new}))
    assert getattr(change.options, option.field) == (new if option.reloads else old)
    assert (len(change.taken), len(change.refused)) == ((1, 0) if option.reloads else (0, 1))


def test_what_is_shown_is_short_and_nothing_is_called_none() -> None:
    change = reread(replace(RUNNING, allow_user=("ada",)), replace(RUNNING, chat_template="{{ x }}" * 100))
    assert change.refused[0].startswith("--chat-template stays not set: {{ x }}")
    assert len(change.refused[0]) < 130
    assert change.refused[1] == "--allow-user stays ada: not set takes a restart"
