"""How names name metrics: which words before a number do, and which are settings and parts of words."""

from __future__ import annotations

import re

_FLAGS = re.ASCII | re.IGNORECASE
SEPARATOR = r"[-_=.: (\[]{0,2}"
"""What may stand between a key and its number."""

WORDS = re.compile(rf"((?:[a-z][a-z0-9]*[-_/])*[a-z][a-z0-9]*){SEPARATOR}$", _FLAGS)
_METRIC = re.compile(
    r"[a-z]*(?:loss|accuracy|error|score)|acc[15]?|err|top[15]|f1|auc|auroc|bleu4?|rouge[12l]?|m?ap(?:50|75)?|"
    r"m?iou|psnr|ssim|perplexity|ppl|[wc]er|r2|r?mse|mae|dice|precision|recall|fid|reward|mrr|ndcg|kappa|"
    r"mcc|elbo|nll|bpc|metric|jaccard|specificity|sensitivity|epe|cider|meteor|chrf|bertscore",
    _FLAGS,
)
_PART_OF_LOSS = re.compile(r"kld?|b?ce|ctc|recon|l[12]", _FLAGS)
"""What is a metric where it is of some data, ``val_kl``, and may be a weight elsewhere."""

_SPLIT = re.compile(r"val|valid|validation|eval|test|dev|train|training", _FLAGS)
_NOT_MEASURED = re.compile(r"grad|gradient|no|without|use|with", _FLAGS)
"""Words before a metric's that make something else of it: ``grad_acc_4`` accumulates."""

MEAN_OF_METRIC = re.compile(rf"[a-z0-9]_(?:epoch|step){SEPARATOR}$", _FLAGS)
"""How Lightning calls the mean over an epoch: ``train_loss_epoch``."""

BITS = frozenset({"16", "32", "64"})
"""What follows ``precision`` where it is that of the numbers."""

IN_WORD = re.compile(
    r"(?:(?<![a-z])|(?<=_))(?:acc|top|m?ap)(?:50[-_]95|1|5|10|50|75)(?=[-_=: @]{1,2}[0-9])", _FLAGS
)
"""A number that is a part of a metric's name: ``acc1_76.13``."""

NO_NUMBER = re.compile(r"=(nan|[-+]?inf)(?![a-z0-9])", _FLAGS)
"""What Lightning writes into a name for a metric that is no finite number."""

FRACTION = re.compile(
    r"_([0-9]{1,18})(?![a-z0-9]|\.[0-9]|[-_]of[-_]|"
    r"[-_ ]?(?:epochs?|ep|steps?|iterations?|iters?|updates?)(?![a-z0-9]))",
    _FLAGS,
)
"""What follows ``val_loss_0`` where somebody wrote ``_`` for the point: in ``val_loss_1_25`` nobody knows."""

_MAX_BETWEEN = 3
_QUALIFIER = re.compile(
    r"val|valid|validation|eval|test|train|training|dev|macro|micro|mean|avg|weighted|balanced|top[15]",
    _FLAGS,
)
_QUALIFIES = re.compile(rf"{_QUALIFIER.pattern}|epoch|step", _FLAGS)
"""The same behind a metric, where Lightning says over what it took the mean."""


def metric_name(words: str) -> str | None:
    """Return the metric that words before a number name: one of their last words, and what qualifies it.

    ``val_loss``, ``val_ce_loss``, ``f1_macro`` and ``loss_val`` are metrics, and ``loss_weight`` is none.
    """
    parts = re.split(r"([-_/])", words)
    last = len(parts) - 1
    while last > 0 and _QUALIFIES.fullmatch(parts[last]) and not _METRIC.fullmatch(parts[last]):
        last -= 2
    before = parts[last - 2] if last >= 2 else ""
    is_part = _PART_OF_LOSS.fullmatch(parts[last]) and _SPLIT.fullmatch(before)
    if not (_METRIC.fullmatch(parts[last]) or is_part) or _NOT_MEASURED.fullmatch(before):
        return None
    first = last
    while first >= 2 and (_QUALIFIER.fullmatch(parts[first - 2]) or _METRIC.fullmatch(parts[first - 2])):
        first -= 2
    for further in range(first - 4, max(-1, first - 4 - 2 * _MAX_BETWEEN), -2):
        if parts[further + 1] == "_" and _SPLIT.fullmatch(parts[further]):
            if "best" not in map(str.lower, parts[further:first]):
                first = further
            break
    return "".join(parts[first:])
