"""What is told of an answer's tokens."""

from lanes.lane import Logprob
from scheduler.channels import Channels, Piece
from scheduler.protocol import TokenLogprob, TopLogprob
from scheduler.text import TextStream
from scheduler.transcript import Transcript
from tests.scheduler.bytes_tokenizer import ByteStream, ByteTokenizer

MARKS = {"normal": [("[", "reasoning")], "reasoning": [("]", "normal")]}


def transcript(*stops: str, **options: object) -> Transcript:
    return Transcript(TextStream(ByteStream(), stops), **options)  # type: ignore[arg-type]


def take_all(answer: Transcript, text: str, logprobs: list[Logprob] | None = None) -> Piece:
    """Token by token up to a stop or the end of the text, which is the last token."""
    pieces = []
    for place, token in enumerate(text.encode()):
        logprob = logprobs[place] if logprobs else None
        pieces.append(answer.take(token, logprob, is_end=False, is_last=place == len(text) - 1))
        if answer.stopped_by is not None:
            break
    return Piece.joined(pieces)


def test_the_prompt_is_told_first_where_it_is_to_be_echoed() -> None:
    answer = transcript(echo="say: ")
    first = answer.take(ord("a"), None, is_end=False, is_last=False)
    assert (first.text, first.token_ids) == ("say: a", [ord("a")])
    assert answer.take(ord("b"), None, is_end=False, is_last=True).text == "b"


def test_a_prompt_whose_answer_is_empty_is_echoed_too() -> None:
    piece = transcript(echo="say: ").take(256, None, is_end=True, is_last=True)
    assert (piece.text, piece.token_ids) == ("say: ", [])


def test_no_stop_string_is_looked_for_in_the_first_tokens() -> None:
    assert take_all(transcript("ab"), "xabyab").text == "x"
    assert take_all(transcript("ab", min_tokens=3), "xabyab").text == "xaby"
    assert take_all(transcript("ab", min_tokens=2), "xabyab").text == "xaby"
    assert take_all(transcript("ab", min_tokens=1), "xabyab").text == "x"


def test_parts_are_told_apart_and_stops_end_them_all() -> None:
    answer = transcript("END", channels=Channels(MARKS))
    piece = take_all(answer, "a[bcENDd]e")
    assert (piece.text, piece.reasoning, answer.stopped_by) == ("a", "bc", "END")


def test_log_probabilities_go_with_their_tokens() -> None:
    answer = transcript("c", token_text=ByteTokenizer().token_text)
    told = [Logprob(-0.5, ((98, -0.25), (97, -0.5))), Logprob(-1.0), Logprob(-2.0)]
    piece = take_all(answer, "abc", told)
    # The token that completes a stop string is one of the answer, as its text may hold more.
    assert piece.token_ids == [97, 98, 99]
    top = (TopLogprob(98, "b", -0.25), TopLogprob(97, "a", -0.5))
    assert piece.logprobs[0] == TokenLogprob(97, "a", -0.5, top)
    assert [logprob.token for logprob in piece.logprobs] == ["a", "b", "c"]
    end = transcript().take(256, Logprob(-0.1), is_end=True, is_last=True)
    assert (end.token_ids, end.logprobs) == ([], [])
