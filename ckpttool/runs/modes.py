"""Modes of metrics: whether lower or higher values are better, by the words in a name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import get_args

from ckpttool.core.errors import UsageError
from ckpttool.core.options import Mode

_LOWER = """
bce bpb bpc brier ce cer cost distance eer entropy err error fid kl loss losses mae mape mse nll perplexity
ppl regret rmse ter wer
"""
_HIGHER = """
acc accuracy ap auc auprc auroc bleu chrf correct dice em exact f f1 hit hits iou kappa map mcc miou mrr ndcg
pearson precision psnr r2 recall reward rewards rouge rougel sensitivity spearman specificity ssim
"""
_WORDS: Mapping[Mode, frozenset[str]] = {
    "min": frozenset(_LOWER.split()),
    "max": frozenset(_HIGHER.split()),
}
"""The words of names: the last one in a name counts, so that ``acc_loss`` is a loss."""
_INVERTING = frozenset({"neg", "negative", "negated", "minus", "inv", "inverse", "non"})
"""Words that may invert the mode: ignite's ``neg_val_loss`` is better if it is higher."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+\d?")
_BETTER = {"min": "lower", "max": "higher"}


def mode_of(metric: str) -> Mode | None:
    """Return the mode of a metric by its name; None if that is unclear."""
    # The last known word counts, without digits: ``val_acc_loss`` is a loss, ``hits10`` is ``hits``. ``f1``
    # and ``r2`` are words with their digits.
    found = _WORD.findall(metric)
    if not _INVERTING.isdisjoint(map(str.lower, found)):
        return None
    for word in reversed(found):
        for mode, words in _WORDS.items():
            if {word.lower(), word.lower().rstrip("0123456789")} & words:
                return mode
    return None


def check_mode(mode: Mode | None) -> None:
    """Require a valid mode, before anything is read."""
    if mode not in (None, *get_args(Mode)):
        raise UsageError(f"--mode {mode} (min or max)")


def resolve_mode(metric: str, mode: Mode | None, flag: str) -> Mode:
    """Return the given mode, or else that of the metric's name.

    Args:
        metric: The metric.
        mode: Mode given by the user.
        flag: The option that the metric was given by.

    Raises:
        UsageError: None was given, and the name is unclear.
    """
    found = mode or mode_of(metric)
    if found is None:
        raise UsageError(
            f"{flag} {metric}: can't tell whether low or high values are good; use --mode min or max"
        )
    return found


def mode_note(metric: str) -> str:
    """Return the note about an inferred mode; empty if none can be inferred."""
    mode = mode_of(metric)
    if mode is None:
        return ""
    return f"{metric}: {_BETTER[mode]} is better (--mode {'max' if mode == 'min' else 'min'} otherwise)"
