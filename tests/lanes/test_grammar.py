"""Rows that keep to a grammar: beside others, wherever they are, to its end; and what is no grammar is told so."""

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from lanes import grammar as grammar_module
from lanes.batch import SlotCaches
from lanes.decoder import Decoder
from lanes.engine import MlxEngine
from lanes.forward import eager
from lanes.grammar import MAX_COMPILED, GrammarCompiler, GrammarError, Grammars
from lanes.lane import Chunk, Grammar, RowSpec, Sampling, Step
from lanes.solo import RowMaker
from tests.lanes.characters import END, character_tokenizer
from tests.lanes.driver import INFO, Driver, engine_for
from tests.lanes.schemas import assert_valid, schemas
from tests.lanes.tiny import VOCABULARY, prompt_of, tiny_llama

MODEL = tiny_llama()
TOKENIZER = character_tokenizer()
DATE = Grammar("regex", "[0-9]{4}-[0-9]{2}-[0-9]{2}")
HOT = Sampling(temperature=1.0)


def engine(early_reads: bool = False) -> MlxEngine:
    make_row = RowMaker(MODEL)
    caches = SlotCaches(make_row(), 64)
    grammars = Grammars(TOKENIZER.grammars, TOKENIZER.eos_token_ids)
    decoder = Decoder(caches, partial(eager, MODEL, caches))
    return MlxEngine(make_row, INFO, decoder, early_reads=early_reads, grammars=grammars)


def answers_of(specs: list[RowSpec], running: MlxEngine, most_tokens: int = 2000) -> dict[int, list[int]]:
    """Each row's tokens up to its end token, all of them entering at once."""
    for spec in specs:
        if len(spec.prompt) > 1:
            running.step(Step(admit=(spec,), chunk=Chunk(spec.row_id, 0, len(spec.prompt) - 1)))
    merge = tuple(spec.row_id for spec in specs)
    answers: dict[int, list[int]] = {row_id: [] for row_id in merge}
    open_rows, leave = set(merge), tuple[int, ...]()
    for _ in range(most_tokens):
        result = running.step(Step(leave=leave, merge=merge))
        assert not result.failures, result.failures
        merge, ended = (), set()
        for row_id, token in result.tokens:
            if row_id in open_rows - ended:
                answers[row_id].append(token)
                ended |= {row_id} if token == END else set()
        open_rows -= ended
        leave = tuple(ended)
        if not open_rows:
            break
    assert not open_rows, {row_id: TOKENIZER.decode(answers[row_id]) for row_id in open_rows}
    running.step(Step(leave=leave))
    running.check()
    assert running.grammars is not None
    assert len(running.grammars) == 0
    return answers


@pytest.mark.parametrize("early_reads", [False, True])
def test_schemas_of_many_kinds_give_valid_json(early_reads: bool) -> None:
    """A model that knows nothing, at temperature 1: only the grammar can make this JSON."""
    told = schemas(40, seed=1)
    specs = [
        RowSpec(i, prompt_of(3 + i % 5, i), replace(HOT, seed=i, grammar=Grammar("json", json.dumps(schema))))
        for i, schema in enumerate(told)
    ]
    answers = answers_of(specs, engine(early_reads))
    for row_id, schema in enumerate(told):
        assert answers[row_id][-1] == END
        text = TOKENIZER.decode(answers[row_id])
        assert_valid(text, schema)


def test_rows_come_and_go_beside_others_which_notice_nothing() -> None:
    plain = [RowSpec(i, prompt_of(4 + i, i), replace(HOT, seed=i)) for i in range(3)]
    bound = [RowSpec(10 + i, prompt_of(6 + i, i), replace(HOT, seed=i, grammar=DATE)) for i in range(3)]
    rows = [
        *((2 * i, spec, 25) for i, spec in enumerate(plain)),
        *((3 + 4 * i, spec, 11) for i, spec in enumerate(bound)),
    ]
    together = Driver(engine()).run(rows)
    for spec in (*plain, *bound):
        alone = Driver(engine()).run([(0, spec, len(together[spec.row_id]))])
        assert together[spec.row_id] == alone[spec.row_id]
    for spec in bound:
        text = TOKENIZER.decode(together[spec.row_id])
        assert [len(part) for part in text.split("-")] == [4, 2, 2], text
        assert together[spec.row_id][-1] == END


@pytest.mark.parametrize("early_reads", [False, True])
@pytest.mark.parametrize(("out", "back"), [(2, 3), (3, 4), (4, 9)])
def test_a_row_that_was_set_aside_goes_on_in_its_grammar(out: int, back: int, early_reads: bool) -> None:
    spec = RowSpec(1, prompt_of(5), replace(HOT, seed=4, grammar=DATE))
    other = RowSpec(2, prompt_of(7), Sampling())
    running = engine(early_reads)
    for each in (spec, other):
        running.step(Step(admit=(each,), chunk=Chunk(each.row_id, 0, len(each.prompt) - 1)))
    tokens: list[int] = []
    for turn in range(24):
        step = Step(
            merge=(1, 2) if turn == 0 else (),
            set_aside=(1,) if turn == out else (),
            bring_back=(1,) if turn == back else (),
        )
        result = running.step(step)
        assert not result.failures
        tokens += [token for row_id, token in result.tokens if row_id == 1]
    assert tokens[: tokens.index(END) + 1] == answers_of([spec], engine())[1]


def test_a_grammar_that_cannot_go_on_ends_its_row_alone() -> None:
    """No token of this tokenizer spells the letter."""
    stuck = RowSpec(1, prompt_of(4), replace(HOT, grammar=Grammar("regex", "a[0-9]ß")))
    other = RowSpec(2, prompt_of(4, 1), replace(HOT, grammar=DATE))
    plain = RowSpec(3, prompt_of(9), Sampling())
    driver = Driver(engine())
    driver.run([(0, stuck, 30), (0, other, 11), (0, plain, 12)])
    assert set(driver.failures) == {1}
    assert "grammar cannot go on" in driver.failures[1]
    assert len(driver.answers[3]) == 12
    assert driver.answers[2] == Driver(engine()).run([(0, other, 11)])[2]


def test_a_grammar_that_is_none_ends_its_row_before_its_prompt() -> None:
    """The service refuses such a request; here is what happens to one that comes all the same."""
    bad = RowSpec(1, prompt_of(4), replace(HOT, grammar=Grammar("regex", "(")))
    running = engine()
    result = running.step(Step(admit=(bad,)))
    assert [row_id for row_id, _ in result.failures] == [1]
    running.check()


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (Grammar("regex", "(ab"), "unclosed group|invalid regex"),
        (Grammar("regex", r"(a)\1"), "backreferences|invalid regex"),
        (Grammar("lark", "start: nothing"), 'unknown name: "nothing"'),
        (Grammar("json", '{"type": "thing"}'), "Invalid type: thing"),
        (Grammar("json", '{"not": {}}'), "not"),
        (Grammar("json", '{"enum": []}'), "Unsatisfiable"),
    ],
)
def test_what_is_no_grammar_is_told_in_one_line(grammar: Grammar, says: str) -> None:
    with pytest.raises(GrammarError, match=says) as raised:
        TOKENIZER.compile_grammar(grammar)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) <= 500


class Strange:
    """A tokenizer whose tables are of no kind that is known."""

    backend_tokenizer = SimpleNamespace(to_str=lambda: '{"model": {"type": "Runes"}}')


@pytest.mark.parametrize(("tokenizer", "says"), [(object(), "no tables"), (Strange(), "cannot be matched")])
def test_a_tokenizer_that_grammars_are_not_for_is_no_obstacle_until_one_is_asked_for(
    tokenizer: object, says: str
) -> None:
    compiler = GrammarCompiler(tokenizer, [0])
    compiler.prepare()
    with pytest.raises(GrammarError, match=says):
        compiler.matcher(DATE)


def test_a_compiled_grammar_is_used_again_from_its_beginning() -> None:
    compiler = GrammarCompiler(TOKENIZER._tokenizer, [END])
    first = compiler.matcher(DATE)
    assert first.consume_tokens(TOKENIZER.encode("2026"))
    second = compiler.matcher(DATE)
    assert second.consume_tokens(TOKENIZER.encode("1999-01-02"))
    assert second.is_accepting()
    assert not first.is_accepting()


def test_what_is_held_is_compiled_once_however_many_come_after(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(TOKENIZER._tokenizer, [END])
    waiting = [Grammar("regex", f"{number}") for number in range(MAX_COMPILED + 5)]
    held = [compiler.compile(grammar) for grammar in waiting]
    compiled: list[Grammar] = []
    source = grammar_module._source
    monkeypatch.setattr(grammar_module, "_source", lambda grammar: compiled.append(grammar) or source(grammar))
    for grammar in waiting:
        compiler.matcher(grammar)
    assert compiled == []
    held.clear()
    for grammar in waiting:
        compiler.matcher(grammar)
    assert compiled, "what nobody has goes when others come"
    assert len(compiler._compiled) == MAX_COMPILED


def test_a_matcher_that_is_left_behind_is_found() -> None:
    engine = engine_for(MODEL)
    engine.grammars = Grammars(TOKENIZER.grammars, TOKENIZER.eos_token_ids)
    engine.check()
    engine.grammars.admit(5, DATE)
    with pytest.raises(AssertionError, match=r"rows \[5\] have grammars"):
        engine.check()


def test_masks_are_of_the_models_size_and_free_rows_have_all() -> None:
    """A model may have more rows in its embedding than its tokenizer has tokens, or fewer."""
    grammars = Grammars(TOKENIZER.grammars, TOKENIZER.eos_token_ids)
    grammars.admit(5, DATE)
    digits = set(TOKENIZER.encode("0123456789"))
    for vocabulary in (64, VOCABULARY, 128, 200):
        masks = grammars.masks((3, None, 5), vocabulary)
        assert masks.shape == (3, (vocabulary + 31) // 32)
        allowed = [
            {32 * w + b for w, word in enumerate(row) for b in range(32) if word >> b & 1} for row in masks.tolist()
        ]
        assert allowed[0] == allowed[1] == set(range(32 * masks.shape[1]))
        assert allowed[2] == digits
    grammars.leave(5)
    assert not grammars.concern((3, None, 5))


def test_whitespace_in_json_comes_to_an_end() -> None:
    """Between JSON's tokens there is room for a space or a line's indentation, and no more."""
    matcher = TOKENIZER.grammars.matcher(Grammar("json", '{"type": "object"}'))
    assert matcher.consume_tokens(TOKENIZER.encode("{"))
    spaces = {" ": 1, "  ": 1, "\n" + " " * 16: 17, "\n\n": 1, " \n": 1, "\n" + " " * 100: 33}
    for text, accepted in spaces.items():
        assert matcher.validate_tokens(TOKENIZER.encode(text)) == accepted, repr(text)
