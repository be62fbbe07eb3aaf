"""Findings that are accepted: they fail nothing, and never vanish."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckpttool import Check, Finding, Safety, Severity, Status, Verification
from ckpttool.core.text import counted
from ckpttool.ops.ignored_findings import Ignore, apply_ignores, is_used, refusals

INF = Finding("infinity", Severity.WARNING, "3 infinities", "layer.mask", check="values")
NAN = Finding("nan", Severity.ERROR, "1 NaN", "head.weight", check="values")
CALL = Finding("dangerous-call", Severity.ERROR, "os.system", "data.pkl", check="safety")
CLASS = Finding("unknown-class", Severity.WARNING, "__main__.Net", "data.pkl", check="safety")
UNSEARCHED = Finding("not-scanned", Severity.WARNING, "too long", "data.pkl", check="safety")


def verification(*findings: Finding, **values: Any) -> Verification:
    """Return a verdict under --strict."""
    names = ("structure", "values", "safety")
    checks = tuple(_check(name, [one for one in findings if one.check == name]) for name in names)
    return Verification("m.pth", "pytorch", "zip", Safety.SAFE, checks, findings, **values)


def _check(name: str, own: list[Finding]) -> Check:
    if not own:
        return Check(name, Status.PASSED, "8 tensors")
    unfailed = Check(name, Status.PASSED, "8 tensors")
    return Check(name, Status.FAILED, f"{counted(len(own), 'finding')} in 8 tensors", unfailed=unfailed)


def applied(one: Verification, *ignores: Ignore) -> Verification:
    return apply_ignores(one, ignores, strict=True)


def test_nothing_changes_where_nothing_is_meant() -> None:
    one = verification(INF)
    assert applied(one, Ignore("nan", "x"), Ignore("infinity", "x", "*.weight")) is one
    assert not is_used(Ignore("nan", "x"), one)
    assert not is_used(Ignore("infinity", "x", "*.weight"), one)


def test_a_check_that_only_ignored_findings_failed_passes() -> None:
    ignore = Ignore("infinity", "masks", "*.mask")
    judged = applied(verification(INF), ignore)
    assert judged.findings == (INF._replace(ignored="masks"),)
    assert judged.checks[1] == Check("values", Status.PASSED, "8 tensors, 1 ignored")
    assert judged.passes()
    assert is_used(ignore, judged)


def test_a_partial_check_stays_partial() -> None:
    finding = Finding("unlisted", Severity.WARNING, "not in the manifest", "a.bin", check="manifest")
    partial = Check("manifest", Status.PARTIAL, "1 file")
    failed = Check("manifest", Status.FAILED, "1 finding in 1 file", unfailed=partial)
    one = Verification("m", "pytorch", "zip", Safety.SAFE, (failed,), (finding,))
    judged = applied(one, Ignore("unlisted", "ours"))
    assert judged.checks == (Check("manifest", Status.PARTIAL, "1 file, 1 ignored"),)


def test_what_is_not_meant_still_fails() -> None:
    judged = applied(verification(INF, NAN), Ignore("infinity", "masks"))
    assert judged.findings == (INF._replace(ignored="masks"), NAN)
    assert judged.checks[1] == Check("values", Status.FAILED, "1 finding in 8 tensors, 1 ignored")
    assert not judged.is_valid


def test_a_warning_that_failed_nothing_is_marked_alone() -> None:
    one = verification(NAN, INF)
    one = replace(one, checks=(one.checks[0], Check("values", Status.FAILED, "1 finding in 8 tensors")))
    judged = apply_ignores(one, [Ignore("infinity", "masks")])
    assert judged.findings == (NAN, INF._replace(ignored="masks"))
    assert judged.checks == one.checks


def test_the_first_that_means_it_gives_the_reason() -> None:
    judged = applied(verification(INF), Ignore("infinity", "first"), Ignore("infinity", "second"))
    assert [one.ignored for one in judged.findings] == ["first"]


def test_a_place_is_needed_where_one_is_named() -> None:
    whole = INF._replace(where=None)
    assert not Ignore("infinity", "x", "*").matches(whole)
    assert Ignore("infinity", "x").matches(whole)


def test_dangerous_code_is_never_ignored() -> None:
    one = replace(verification(CALL), safety=Safety.UNSAFE)
    ignore = Ignore("dangerous-call", "it is ours", None, "ckpttool.toml[verify.rule 1]: ignore 1")
    assert applied(one, ignore) is one
    assert refusals(one, [ignore]) == (
        "ckpttool.toml[verify.rule 1]: ignore 1: dangerous-call in m.pth can't be ignored: "
        "loading the file would run code that is known to be dangerous",
    )
    assert is_used(ignore, one)


def test_an_unknown_class_may_be_accepted_and_stays_unknown() -> None:
    judged = applied(replace(verification(CLASS), safety=Safety.UNKNOWN), Ignore("unknown-class", "ours"))
    assert judged.checks[2] == Check("safety", Status.PASSED, "8 tensors, 1 ignored")
    assert judged.safety is Safety.UNKNOWN
    assert refusals(judged, [Ignore("unknown-class", "ours")]) == ()


def test_what_could_not_be_searched_is_skipped_not_passed() -> None:
    judged = applied(verification(UNSEARCHED), Ignore("not-scanned", "known"))
    assert judged.checks[2] == Check("safety", Status.SKIPPED, "1 part could not be searched")


def test_what_could_not_be_opened_never_passes() -> None:
    broken = Finding("truncated", Severity.ERROR, "truncated: 5 of 9 bytes", check="structure")
    one = verification(broken, was_opened=False)
    ignore = Ignore("truncated", "known", None, "c.toml[verify.rule 1]: ignore 1")
    assert applied(one, ignore) is one
    assert refusals(one, [ignore]) == (
        "c.toml[verify.rule 1]: ignore 1: truncated in m.pth can't be ignored: "
        "the checkpoint could not be opened, so nothing else in it was checked",
    )


def test_what_could_not_be_loaded_never_passes() -> None:
    finding = Finding("missing-key", Severity.ERROR, "the model has it", "fc.weight", check="load")
    checks = (Check("load", Status.FAILED, "1 finding"), Check("predict", Status.SKIPPED, "not loaded"))
    one = Verification("m.pth", "pytorch", "zip", Safety.SAFE, checks, (finding,))
    ignore = Ignore("missing-key", "it is made anew", None, "c.toml[verify.rule 1]: ignore 1")
    assert applied(one, ignore) is one
    assert refusals(one, [ignore]) == (
        "c.toml[verify.rule 1]: ignore 1: missing-key in m.pth can't be ignored: "
        "the model could not be loaded, so it was not run",
    )


def test_what_was_owed_stays_owed() -> None:
    owed = Finding("not-predicted", Severity.ERROR, "no framework runs numpy", check="load")
    one = Verification("m.npz", "numpy", None, Safety.SAFE, (Check("load", Status.SKIPPED, "no"),), (owed,))
    assert not applied(one, Ignore("not-predicted", "known")).is_valid
    assert refusals(one, [Ignore("not-predicted", "known")]) == (
        ": not-predicted in m.npz can't be ignored: a requested check was not done",
    )


def test_a_stage_with_its_own_words_passes() -> None:
    finding = Finding("differs", Severity.ERROR, "y differs by 0.1", "y", check="predict")
    check = Check("predict", Status.FAILED, "y differs by 0.1")
    one = Verification("m.pth", "pytorch", "zip", Safety.SAFE, (check,), (finding,))
    judged = apply_ignores(one, [Ignore("differs", "another processor")])
    assert judged.checks == (Check("predict", Status.PASSED, "1 finding ignored"),)
