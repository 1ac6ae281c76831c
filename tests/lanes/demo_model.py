"""The real model of the tests: SmolLM2-135M-Instruct as its package has it."""

from functools import cache
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from lanes.gguf.header import Header, read_header
from lanes.gguf.vocabulary import end_ids, read_tokenizer
from lanes.sources import locate
from lanes.tokenizer import Tokenizer


@cache
def demo_file() -> Path:
    return locate("demo").path


@cache
def demo_header() -> Header:
    return read_header(demo_file())


@cache
def demo_backend() -> PreTrainedTokenizerFast:
    return read_tokenizer(demo_header())


@cache
def demo_tokenizer() -> Tokenizer:
    return Tokenizer(demo_backend(), end_ids(demo_header()))
