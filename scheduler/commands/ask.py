"""`laned ask`: one prompt to a running daemon, the answer printed as it comes."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scheduler import dial
from scheduler.client import Client
from scheduler.log import printable
from scheduler.protocol import Done, TokenLogprob
from scheduler.usage import Parser, UsageError


def main(argv: Sequence[str]) -> int:
    parser = _parser()
    chosen = parser.parse(argv)
    fields = vars(chosen)
    socket, as_json, wait_s = fields.pop("socket"), fields.pop("json"), fields.pop("wait")
    request = _request(**fields)
    if as_json:
        model, done = dial.call(socket, lambda client: _whole(client, request), wait_s)
        print(json.dumps({"model": model, **asdict(done)}))
    else:
        done = dial.call(socket, lambda client: _stream(client, request), wait_s)
        if done.finish_reason == "length" and sys.stderr.isatty():
            print(f"(cut after {done.usage.completion_tokens} tokens: --max-tokens allows more)", file=sys.stderr)
    return 0


def _parser() -> Parser:
    parser = Parser(
        "ask",
        "Send a prompt to a running daemon and print the answer as it comes. ^C cancels it.",
        (
            'laned ask "Why is the sky blue?"',
            'git diff | laned ask - --system "Review this change."',
            'laned ask --raw "Once upon a time" --temperature 0.8 --seed 7 --max-tokens 100',
            'laned ask --json "Name a colour." | jq .usage',
        ),
    )
    parser.add_argument("prompt", metavar="PROMPT", nargs="*", help="what to ask; - reads it from standard input")
    parser.add_argument("--system", metavar="TEXT", help="the system message that goes before it")
    parser.add_argument("--raw", action="store_true", help="send the text as it is, without the model's chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end: text, usage, timings")
    parser.add_argument(
        "--wait", type=float, metavar="SECONDS", help="how long the daemon may be loading its model (default: 10)"
    )
    dial.add_flag(parser)
    group = parser.add_argument_group("how to answer (default: as the daemon was told)")
    group.add_argument("--max-tokens", type=int, metavar="N", help="tokens of the answer at most")
    group.add_argument("--temperature", "--temp", type=float, metavar="T", help="0 takes the likeliest token")
    group.add_argument("--top-p", type=float, metavar="P", help="sample from the tokens that make up this probability")
    group.add_argument("--top-k", type=int, metavar="K", help="sample from this many likeliest tokens; 0 is off")
    group.add_argument(
        "--min-p", type=float, metavar="P", help="leave out what is less likely than this part of the best"
    )
    for name, what in (("repetition", "1 is off"), ("presence", "0 is off"), ("frequency", "0 is off")):
        group.add_argument(
            f"--{name}-penalty", type=float, metavar="P", help=f"makes tokens that came before less likely; {what}"
        )
    group.add_argument("--adapter", metavar="NAME", help="one of the daemon's adapters; none for the model as it is")
    group.add_argument("--seed", type=int, metavar="N", help="the same seed draws the same answer")
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be given several times"
    )
    group.add_argument(
        "--json-schema", metavar="FILE", help="a JSON schema that the answer keeps to; its text may stand here as well"
    )
    group.add_argument("--regex", metavar="REGEX", help="a regular expression that the whole answer matches")
    group.add_argument(
        "--logprobs",
        type=int,
        metavar="N",
        help="print a line for each token: its log-probability, its text and the N likeliest (20 at most) at its place",
    )
    return parser


def _request(
    prompt: list[str],
    system: str | None,
    raw: bool,
    json_schema: str | None,
    regex: str | None,
    logprobs: int | None,
    **options: Any,
) -> dict[str, Any]:
    """The submit's fields. Words that were not quoted together are one prompt."""
    if not prompt:
        raise UsageError("A prompt is missing: `laned ask PROMPT`, or `laned ask -` to read it from standard input.")
    text = sys.stdin.read() if prompt == ["-"] else " ".join(prompt)
    if not text.strip():
        raise UsageError("The prompt is empty: there is nothing to ask.")
    request = {name: value for name, value in options.items() if value is not None}
    if json_schema is not None and regex is not None:
        raise UsageError("--json-schema and --regex both say what the answer looks like: give one of them.")
    if json_schema is not None:
        request["structured_outputs"] = {"json": _schema(json_schema)}
    if regex is not None:
        request["structured_outputs"] = {"regex": regex}
    if logprobs is not None:
        request |= {"logprobs": True, "top_logprobs": logprobs}
    if not raw:
        turns = [{"role": "user", "content": text}]
        return request | {"messages": [{"role": "system", "content": system}, *turns] if system is not None else turns}
    if system is not None:
        raise UsageError("--system goes through the chat template, which --raw leaves out: give one of them.")
    return request | {"prompt": text}


def _schema(given: str) -> Any:
    """The JSON of a file, or the text itself where it is JSON."""
    try:
        return json.loads(given if given.lstrip().startswith("{") else Path(given).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--json-schema {given}: {error.strerror}.") from None
    except ValueError as error:
        raise UsageError(f"--json-schema {given}: no JSON: {error}.") from None


def _line(logprob: TokenLogprob) -> str:
    others = "  ".join(f"{json.dumps(top.token, ensure_ascii=False)} {top.logprob:.3f}" for top in logprob.top_logprobs)
    line = f"{logprob.logprob:9.3f}  {json.dumps(logprob.token, ensure_ascii=False):20}  {others}"
    return line.rstrip() + "\n"


async def _stream(client: Client, request: dict[str, Any]) -> Done:
    out, is_terminal, last = sys.stdout, sys.stdout.isatty(), ""
    try:
        async with client.submit(**request) as answer:
            async for delta in answer:
                text = "".join(map(_line, delta.logprobs)) if request.get("logprobs") else delta.text
                # Known before it is shown: an interrupt may come in between.
                last = text[-1:] or last
                # A model may write what moves a cursor; in a file it stays as it is.
                out.write(printable(text, keep="\n\t") if is_terminal else text)
                out.flush()
    finally:
        if last not in ("", "\n"):
            out.write("\n")
            out.flush()
    return answer.done


async def _whole(client: Client, request: dict[str, Any]) -> tuple[str, Done]:
    return client.hello.model, await client.ask(**request)
