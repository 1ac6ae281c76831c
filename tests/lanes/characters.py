"""A tokenizer for tiny models: a token for each printable character of ASCII, for a new line, and for the end."""

from functools import cache

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lanes.tokenizer import Tokenizer
from tests.lanes.tiny import VOCABULARY

CHARACTERS = [chr(code) for code in range(0x20, 0x7F)] + ["\n"]
END = len(CHARACTERS)
assert END + 1 == VOCABULARY


@cache
def character_tokenizer() -> Tokenizer:
    spelled = {" ": "\u0120", "\n": "\u010a"}  # as byte-level tokenizers spell them
    vocabulary = {spelled.get(character, character): token for token, character in enumerate(CHARACTERS)}
    backend = Backend(models.BPE(vocab={**vocabulary, "<end>": END}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>"), [END])
