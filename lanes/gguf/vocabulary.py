"""The tokenizer inside a GGUF file, rebuilt as a transformers tokenizer that gives the ids the model was trained with.

A file has the pieces, not the pipeline; how text is cut before it is merged is one word, `tokenizer.ggml.pre`. A word
is read only if its pipeline is known exactly and was compared with published vocabularies and their expected ids;
others are refused by name, since a tokenizer that is nearly right makes a model that is quietly worse. No MLX.

Two kinds of vocabulary occur in the families that are read: "gpt2", byte-level BPE with a list of merges, and "llama",
SentencePiece's BPE, where a piece's score is the order in which it is merged and bytes are spelled <0x00>.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lanes.gguf.header import GgufError, Header

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # tokenizer.ggml.token_type
_SPACE = "\u2581"  # how SentencePiece spells a space
# The pieces for runs of spaces share one score in the published vocabularies, so that their order is not in the file.
# Runs up to this length are compared with SentencePiece's rule when a file is read; no known piece is half as long.
LONGEST_RUN = 64

# Control tokens that end an answer under every template that has them. Files name one of them as the end, and models
# that were trained in two stages emit another.
_ENDS = frozenset({"<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>", "<end_of_turn>"})


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How a named kind of byte-level BPE cuts text before merging.

    digits: cut every digit off first. pattern: a regular expression whose matches are the cut; None for GPT-2's own.
    whole_words: a cut that is a piece is not merged at all. nfc: compose characters first. bos: a text begins with the
    token for it unless the file says otherwise.
    """

    digits: bool = False
    pattern: str | None = None
    whole_words: bool = False
    nfc: bool = False
    bos: bool = False


def _words(digits: str) -> str:
    """The pattern of Llama 3 and of Qwen 2, which differ in how many digits go together."""
    contraction = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    word, sign, space = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+|\s+(?!\S)|\s+"
    return f"{contraction}|{word}|{digits}|{sign}|{space}"


_LLAMA3 = Pipeline(pattern=_words(r"\p{N}{1,3}"), whole_words=True, bos=True)
PIPELINES = {
    "gpt-2": Pipeline(),
    "mpt": Pipeline(),
    "smollm": Pipeline(digits=True),
    "starcoder": Pipeline(digits=True),
    "refact": Pipeline(digits=True),
    "command-r": Pipeline(digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": Pipeline(pattern=_words(r"\p{N}"), nfc=True),
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the metadata says of the pieces: their text and their type, by id."""

    pieces: list[str]
    types: list[int]
    metadata: Mapping[str, Any]

    def of_type(self, wanted: int) -> list[str]:
        return [piece for piece, kind in zip(self.pieces, self.types, strict=True) if kind == wanted]

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    @property
    def leading_space(self) -> bool:
        """Whether SentencePiece puts a space in front of a text."""
        return bool(self.get("add_space_prefix", True))

    def special(self, key: str) -> int | None:
        """The id under tokenizer.ggml.KEY_token_id; None if there is none."""
        value = self.get(f"{key}_token_id")
        is_id = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(self.pieces)
        return value if is_id else None


def read_tokenizer(header: Header) -> PreTrainedTokenizerFast:
    """The tokenizer, with the chat template. Raises GgufError if it cannot be rebuilt exactly."""
    vocabulary = _vocabulary(header)
    kind = vocabulary.get("model")
    if kind == "gpt2":
        backend = _byte_level(header, vocabulary)
        bos = PIPELINES[vocabulary.get("pre")].bos
    elif kind == "llama":
        backend = _sentencepiece(header, vocabulary)
        bos = True
    else:
        raise GgufError(
            f"{header.path} has a tokenizer of the kind {kind!r}; gpt2 (BPE) and llama (SentencePiece) can be read"
        )
    # Control tokens are found in a text before anything else is done to it, and are left out of decoded text.
    backend.add_special_tokens(
        [AddedToken(piece, special=True, normalized=False) for piece in vocabulary.of_type(_CONTROL)]
    )
    # SentencePiece looks for pieces that a user has defined in the text with its spaces spelled out, which is another
    # text if it spells one itself. A space that is put in front would be put in front of the pieces, too.
    spelled_out = kind == "llama" and not vocabulary.leading_space
    backend.add_tokens(
        [AddedToken(piece, special=False, normalized=spelled_out) for piece in vocabulary.of_type(_USER_DEFINED)]
    )
    _add_ends(backend, vocabulary, bos)
    template = header.metadata.get("tokenizer.chat_template")
    named = {name: vocabulary.special(key) for key, name in _SPECIAL_NAMES.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=template if isinstance(template, str) else None,
        clean_up_tokenization_spaces=False,
        **{name: vocabulary.pieces[token] for name, token in named.items() if token is not None},
    )


_SPECIAL_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def end_ids(header: Header) -> frozenset[int]:
    """The ids that end an answer."""
    vocabulary = _vocabulary(header)
    named = (vocabulary.special(key) for key in ("eos", "eot", "eom"))
    well_known = (
        token
        for token, (piece, kind) in enumerate(zip(vocabulary.pieces, vocabulary.types, strict=True))
        if kind == _CONTROL and piece in _ENDS
    )
    return frozenset(token for token in (*named, *well_known) if token is not None)


def _vocabulary(header: Header) -> Vocabulary:
    pieces = header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(pieces, list) or not all(isinstance(piece, str) for piece in pieces):
        raise GgufError(f"{header.path} has no vocabulary (tokenizer.ggml.tokens)")
    types = header.metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(pieces))
    if not isinstance(types, list) or len(types) != len(pieces):
        raise GgufError(f"{header.path} has {len(pieces)} tokens, but another number of token types")
    if len(set(pieces)) != len(pieces):
        raise GgufError(f"{header.path} has two tokens of the same text in its vocabulary")
    return Vocabulary(pieces, types, header.metadata)


def _byte_level(header: Header, vocabulary: Vocabulary) -> Tokenizer:
    name = vocabulary.get("pre")
    pipeline = PIPELINES.get(name) if isinstance(name, str) else None
    if pipeline is None:
        known = ", ".join(PIPELINES)
        raise GgufError(
            f"{header.path} cuts text by {name!r} (tokenizer.ggml.pre), not known here exactly; known are {known}"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in vocabulary.get("merges", [])]
    ids = {piece: token for token, piece in enumerate(vocabulary.pieces)}
    try:
        bpe = models.BPE(vocab=ids, merges=merges, ignore_merges=pipeline.whole_words)
    except Exception as error:  # the library raises nothing more particular
        raise GgufError(f"{header.path} has merges that do not fit its vocabulary: {error}") from None
    tokenizer = Tokenizer(bpe)
    cuts: list[pre_tokenizers.PreTokenizer] = []
    if pipeline.digits:
        cuts.append(pre_tokenizers.Digits(individual_digits=True))
    if pipeline.pattern is not None:
        cuts.append(pre_tokenizers.Split(Regex(pipeline.pattern), "isolated"))
    cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pipeline.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    if pipeline.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(header: Header, vocabulary: Vocabulary) -> Tokenizer:
    scores = vocabulary.get("scores")
    if not isinstance(scores, list) or len(scores) != len(vocabulary.pieces):
        raise GgufError(f"{header.path} has no score for each piece of its vocabulary")
    ids = {piece: token for token, piece in enumerate(vocabulary.pieces)}
    unknown = vocabulary.special("unknown")
    bpe = models.BPE(
        vocab=ids,
        merges=_merges(header, vocabulary, ids, scores),
        unk_token=None if unknown is None else vocabulary.pieces[unknown],
        fuse_unk=True,
        byte_fallback=bool(vocabulary.of_type(_BYTE)),
    )
    tokenizer = Tokenizer(bpe)
    for length in range(1, LONGEST_RUN):
        run = _SPACE * length
        if [token.value for token in bpe.tokenize(run)] != _leftmost(run, ids, scores):
            raise GgufError(f"{header.path} has pieces for runs of spaces that are merged in an order not known here")
    leading = vocabulary.leading_space
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if leading else spaces
    steps: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if leading else steps)
    return tokenizer


def _merges(
    header: Header, vocabulary: Vocabulary, ids: Mapping[str, int], scores: list[float]
) -> list[tuple[str, str]]:
    """All ways to make a piece of two others, in the order of SentencePiece: the highest score is merged first."""
    mergeable = {
        piece: scores[token]
        for token, piece in enumerate(vocabulary.pieces)
        if vocabulary.types[token] == _NORMAL and len(piece) > 1
    }
    words = [score for piece, score in mergeable.items() if piece.strip(_SPACE)]
    if len(set(words)) != len(words):
        raise GgufError(f"{header.path} has pieces of equal score, which leave open what is merged first")
    merges = []
    for piece in sorted(mergeable, key=mergeable.__getitem__, reverse=True):
        halves = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        merges += sorted((pair for pair in halves if pair[0] in ids and pair[1] in ids), key=lambda pair: ids[pair[0]])
    return merges


def _leftmost(text: str, ids: Mapping[str, int], scores: list[float]) -> list[str]:
    """The pieces that SentencePiece makes of a text: the best-scored pair is merged, of equals the leftmost."""
    pieces = list(text)
    while True:
        pairs = [
            (scores[ids[pieces[at] + pieces[at + 1]]], -at)
            for at in range(len(pieces) - 1)
            if pieces[at] + pieces[at + 1] in ids
        ]
        if not pairs:
            return pieces
        at = -max(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


def _add_ends(tokenizer: Tokenizer, vocabulary: Vocabulary, bos_by_default: bool) -> None:
    """Have a text begin and end with the tokens that the file asks for."""
    before = vocabulary.special("bos") if vocabulary.get("add_bos_token", bos_by_default) else None
    after = vocabulary.special("eos") if vocabulary.get("add_eos_token", False) else None
    added = [(vocabulary.pieces[token], token) for token in (before, after) if token is not None]
    if added:
        first = [] if before is None else [vocabulary.pieces[before]]
        last = [] if after is None else [vocabulary.pieces[after]]
        template = [*first, "$A", *last]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=added)
