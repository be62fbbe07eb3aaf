"""What somebody meant by a word that there is not."""

from __future__ import annotations

import pytest

from ckpttool.core.text import did_you_mean


@pytest.mark.parametrize(
    ("word", "known", "question"),
    [
        ("inspct", ["inspect", "list"], "did you mean inspect?"),
        ("keep_daily", ["keep-last", "keep-daily"], "did you mean keep-daily?"),
        ("Simple", ["SimpleModel", "Net"], "did you mean SimpleModel?"),
        (
            "epoch",
            ["values.run.epoch", "training.epoch", "values.epoch", "epochs"],
            "did you mean training.epoch?",
        ),
        ("fc.weight", ["fc.bias", "model.fc.weight"], "did you mean model.fc.weight?"),
        ("Loss", ["loss"], "did you mean loss?"),
        ("optimizer", ["loss", "epoch"], ""),
        ("loss", [], ""),
    ],
)
def test_the_closest_word_is_suggested(word: str, known: list[str], question: str) -> None:
    assert did_you_mean(word, known) == question
