"""A model with sliding windows, from its GGUF file to an answer on the terminal."""

import json
from pathlib import Path

import pytest

from tests.e2e.daemon import serving
from tests.lanes.gemma_model import gemma_file


@pytest.mark.slow
def test_gemma_is_served_and_answers(tmp_path: Path) -> None:
    with serving(tmp_path, "--blas", "auto", "--model", str(gemma_file())) as daemon:
        question = "Question: What colour is the sky on a clear day?\nAnswer:"
        asked = daemon.run("ask", "--raw", question, "--max-tokens", "8", "--stop", "\n")
        assert (asked.returncode, asked.stdout, asked.stderr) == (0, " Blue\n", "")
        refused = daemon.run("ask", "Why?")
        assert refused.returncode == 2
        assert "no chat template" in refused.stderr
        model = json.loads(daemon.run("status", "--json").stdout)["model"]
        assert (model["model_type"], model["lane"]) == ("gemma3_text", "batch")
        assert daemon.terminate() == 0, daemon.log
