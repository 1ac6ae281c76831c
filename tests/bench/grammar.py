"""What keeping to a grammar costs: decode steps of rows that all write JSON by a schema, beside the same rows without,
in turns, in one engine; and the time of one mask alone.

The masks are computed while the forward pass runs. What is left is the wait for the last tokens before a step is drawn,
and one more operation on the logits. On a GPU the model's weights are random and its tokenizer made up, as large as the
vocabulary of the model whose shape it is.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from itertools import count
from random import Random

from tests.bench.drive import BLAS

# isort: split
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lanes.build import build_engine
from lanes.engine import MlxEngine
from lanes.grammar import Grammars
from lanes.lane import Grammar, LaneSettings, RowSpec, Sampling, Step
from lanes.load import LoadedModel, load
from lanes.tokenizer import Tokenizer
from lanes.tuning import backend
from tests.bench.harness import bench, interleave
from tests.bench.models import default_model, weight_bytes

# No end within a measurement.
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mail": {"type": "string", "pattern": "^[a-z]{1,8}@[a-z]{1,8}\\.org$"},
    },
    "required": ["name", "age", "mail"],
    "additionalProperties": False,
}
SCHEMA = Grammar("json", json.dumps({"type": "array", "items": PERSON, "minItems": 10_000}))
HOT = Sampling(temperature=1.0)
WARM_UP = 3

_numbers = count(1)


def loaded_model() -> tuple[str, LoadedModel]:
    if backend() == "cpu":
        return "SmolLM2-135M", load("demo")
    name, model = default_model()
    config = {"model_type": model.args.model_type, "vocab_size": model.args.vocab_size}
    tokenizer = made_up_tokenizer(model.args.vocab_size)
    return name, LoadedModel(model, tokenizer, config, "bench", weight_bytes(model), "bfloat16", None, "")


def made_up_tokenizer(vocabulary: int) -> Tokenizer:
    """Of all bytes, and of words that grow from others by a letter or two, as those of byte-pair encoding do."""
    source, alphabet = Random(0), sorted(pre_tokenizers.ByteLevel.alphabet())
    words = dict.fromkeys(alphabet)
    grown = [
        *"abcdefghijklmnoprstuvwyz",
        *(f"\u0120{letter}" for letter in "abcdefghijklmnoprstuvwyz"),
        *'",:{}[]0123456789',
    ]
    while len(words) < vocabulary - 1:
        word = source.choice(grown) + "".join(source.choices("aeiounrstldmck", k=source.randint(1, 2)))
        if word not in words and len(word) < 14:
            words[word] = None
            grown.append(word)
    tables = Backend(models.BPE(vocab={word: token for token, word in enumerate(words)}, merges=[]))
    tables.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tables.decoder = decoders.ByteLevel()
    tables.add_special_tokens(["<end>"])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=tables, eos_token="<end>"), [vocabulary - 1])


def tokens_per_s(engine: MlxEngine, rows: int, steps: int, grammar: Grammar | None) -> float:
    """Of rows that enter for this measurement, and leave after it."""
    numbers = [next(_numbers) for _ in range(rows)]
    specs = tuple(RowSpec(number, (1,), replace(HOT, seed=number, grammar=grammar)) for number in numbers)
    engine.step(Step(admit=specs, merge=tuple(numbers)))
    for _ in range(WARM_UP):
        engine.step(Step())
    began = time.perf_counter()
    for _ in range(steps):
        assert not engine.step(Step()).failures
    seconds = time.perf_counter() - began
    engine.step(Step(leave=tuple(numbers)))
    engine.check()
    return rows * steps / seconds


def mask_us(loaded: LoadedModel, tokens: list[int]) -> float:
    """Microseconds to take a token and say what may come next, for one row, the mean of a whole answer."""
    grammars = Grammars(loaded.tokenizer.grammars, loaded.tokenizer.eos_token_ids)
    grammars.admit(1, SCHEMA)
    vocabulary = loaded.config["vocab_size"]
    began = time.perf_counter()
    for token in tokens:
        assert grammars.allow((1,), {1: token}, vocabulary) is not None
    return (time.perf_counter() - began) * 1e6 / len(tokens)


def main() -> None:
    with bench("grammar", __doc__ or "") as run:
        run.blas = BLAS.sentence
        name, loaded = loaded_model()
        engine = build_engine(loaded, LaneSettings(max_rows=32, num_draft_tokens=0), BLAS.kind)
        people = [{"name": f"Person {n}", "age": n, "mail": f"p{chr(97 + n % 26)}@home.org"} for n in range(20)]
        written = loaded.tokenizer.encode(json.dumps(people)[:-1])
        masks = [mask_us(loaded, written) for _ in range(3 if run.quick else 10)]
        run.add(f"{name}, one row", f"mask, mean of {len(written)} tokens", "us", masks, more_is_better=False)
        rounds, steps = (2, 8) if run.quick else (5, 24 if backend() == "cpu" else 100)
        for rows in (8,) if run.quick else (1, 8, 32):
            measures = [partial(tokens_per_s, engine, rows, steps, grammar) for grammar in (SCHEMA, None)]
            run.add(
                f"{name}, {rows} rows",
                "decode with a grammar / without",
                "tokens/s",
                *interleave(rounds, "grammar", *measures),
            )


if __name__ == "__main__":
    main()
