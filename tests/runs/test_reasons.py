"""Tests of reasons: codes for programs, words for people."""

from __future__ import annotations

import copy
import json
import pickle

import pytest

from ckpttool.runs.reasons import Code, Reason, code_of, fault, true_of_all


@pytest.mark.parametrize(
    ("reason", "text", "code"),
    [
        (fault(Code.DAMAGED, "cut short"), "damaged: cut short", Code.DAMAGED),
        (fault(Code.DAMAGED), "damaged", Code.DAMAGED),
        (Reason(Code.NEWEST), "newest", Code.NEWEST),
        (
            Reason(Code.BEING_WRITTEN, "being written: it changed"),
            "being written: it changed",
            Code.BEING_WRITTEN,
        ),
    ],
)
def test_a_reason_is_its_words_and_keeps_its_code(reason, text, code) -> None:
    assert reason == text
    assert json.dumps([reason]) == json.dumps([text])
    for same in (reason, pickle.loads(pickle.dumps(reason)), copy.deepcopy(reason)):
        assert (str(same), code_of(same)) == (text, code)


def test_words_alone_have_no_code() -> None:
    assert code_of("damaged: cut short") is None


def test_what_matched_nothing_is_said_if_it_is_true_of_all_directories() -> None:
    unmatched = Reason(Code.MATCHED_NOTHING, "--exclude 'a*' matched nothing")
    assert list(true_of_all([[unmatched, "one"], ["one", "two"]])) == ["one", "two"]
    assert list(true_of_all([[unmatched], [unmatched, "two"]])) == [unmatched, "two"]
