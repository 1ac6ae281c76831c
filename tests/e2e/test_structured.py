"""The real model at temperature 1, through the socket: what it answers keeps to what was asked."""

from __future__ import annotations

import re
from textwrap import indent
from typing import Any

import pytest
import trio

from scheduler.answer import RequestError
from scheduler.client import Client
from scheduler.protocol import Done
from tests.e2e.daemon import Daemon
from tests.e2e.test_commands import readme_example
from tests.lanes.schemas import assert_valid, schemas
from tests.scheduler.trio_test import trio_test

MAX_TOKENS = 400


async def answers(daemon: Daemon, wanted: list[dict[str, Any]], prompt: str = "Answer in JSON: ") -> list[Done]:
    """One answer for each of structured_outputs, all asked for at once."""
    done: list[Done | None] = [None] * len(wanted)

    async def ask(client: Client, place: int) -> None:
        done[place] = await client.ask(
            prompt, temperature=1.0, seed=place, max_tokens=MAX_TOKENS, structured_outputs=wanted[place]
        )

    async with Client(daemon.socket) as client, trio.open_nursery() as nursery:
        for place in range(len(wanted)):
            nursery.start_soon(ask, client, place)
    return [each for each in done if each is not None]


@trio_test
async def test_schemas_give_valid_json(daemon: Daemon) -> None:
    told = schemas(8, seed=7)
    for schema, done in zip(told, await answers(daemon, [{"json": schema} for schema in told]), strict=True):
        assert done.finish_reason == "stop", (schema, done)
        assert_valid(done.text or "", schema)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(50))
@trio_test
async def test_five_hundred_schemas_give_valid_json(daemon: Daemon, part: int) -> None:
    told = schemas(500, seed=2026)[10 * part : 10 * (part + 1)]
    for schema, done in zip(told, await answers(daemon, [{"json": schema} for schema in told]), strict=True):
        assert done.finish_reason == "stop", (schema, done)
        assert_valid(done.text or "", schema)


@trio_test
async def test_other_shapes(daemon: Daemon) -> None:
    choices = ["größer", 'a "b"', "kleiner\n"]
    schema = {"type": "object", "properties": {"größe": {"enum": ["ü", "日本"]}}, "required": ["größe"]}
    wanted: list[dict[str, Any]] = [
        {"regex": r"[0-9]{4}-[0-9]{2}"},
        {"choice": choices},
        {"grammar": 'start: "(" (NUMBER | start) ")"\nNUMBER: /[1-9][0-9]{0,3}/'},
        {"json": {**schema, "additionalProperties": False}},
    ]
    date, choice, nested, keyed = [done.text or "" for done in await answers(daemon, wanted)]
    assert re.fullmatch(r"\d{4}-\d{2}", date)
    assert choice in choices
    assert re.fullmatch(r"(\(+)[1-9]\d{0,3}(\)+)", nested)
    assert nested.count("(") == nested.count(")")
    assert_valid(keyed, schema)


def test_the_readmes_example_runs(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    body = indent(readme_example("python", "structured_outputs="), " " * 8)
    program = "import json\nimport trio\nfrom scheduler.client import Client\n\nasync def main(path):\n"
    program += f"    async with Client(path) as client:\n{body}"
    names: dict[str, Any] = {}
    exec(program, names)
    trio.run(names["main"], daemon.socket)
    told = capsys.readouterr().out.split("\n")
    assert told[0] in ("{'colour': 'red'}", "{'colour': 'green'}")
    assert [line[:2] for line in told if line[:2] in ("0 ", "1 ", "2 ")] == ["0 ", "1 ", "2 "]


@trio_test
async def test_what_is_no_grammar_is_refused_and_the_next_request_is_served(daemon: Daemon) -> None:
    async with Client(daemon.socket) as client:
        for wanted in ({"regex": "(a"}, {"json": {"type": "thing"}}, {"grammar": "start: nothing"}):
            with pytest.raises(RequestError, match="structured_outputs") as refused:
                await client.ask("a", structured_outputs=wanted)
            assert refused.value.code == "bad_request"
        assert (await client.ask("a", structured_outputs={"regex": "yes|no"})).text in ("yes", "no")
