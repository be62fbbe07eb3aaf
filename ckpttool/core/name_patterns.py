"""Patterns of fields in names: epochs, steps, dates, metrics, values, and words that distinguish siblings."""

from __future__ import annotations

import re

# Names of files may be hostile. Repetitions that could backtrack are bounded ({1,18}, {0,200}), and patterns
# that end with ``$`` are searched in the few characters before a number only (``naming.LOOK_BACK``), so that
# no name takes long.

FLAGS = re.ASCII | re.IGNORECASE
SEPARATOR = r"[-_=.: (\[]{0,2}"
"""Characters between a key and its number."""

SUFFIX = re.compile(r"\.(?:weights\.h5|[a-z]{1,12}|h5|hdf5|pt2)$", FLAGS)
SHARD = re.compile(r"(?<![0-9])(?:[0-9]+|\?{5})[-_]of[-_][0-9]+(?![0-9])", FLAGS)
# The separators of a date are equal (2024-01-31, 20240131, not 2024-0131), and so are those of its time.
DATE = re.compile(
    r"(?<![0-9])((?:19|20)[0-9]{2})([-_.]?)(0[1-9]|1[0-2])\2(0[1-9]|[12][0-9]|3[01])"
    r"(?:[-_t @.]?([01][0-9]|2[0-3])([-_:.h]?)([0-5][0-9])(?:\6([0-5][0-9]))?)?(?![0-9])",
    FLAGS,
)
# An exponent has a sign (1e-3), or one digit and no letter or digit after it (2e5, not 3epochs).
NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?(?:e(?:[-+][0-9]+|[1-9](?![a-z0-9])))?", FLAGS)

EPOCH = re.compile(rf"(?:epochs?|(?:^|[^a-z])ep){SEPARATOR}$", FLAGS)
STEP = re.compile(
    rf"(?:(?:^|[^a-z])(?:global[-_]?)?(?:steps?|iterations?|iters?|itr|it|updates?){SEPARATOR}|ep[0-9]+-ba)$",
    FLAGS,
)
"""Text before a step; Composer counts batches, ``ep1-ba100``."""
TOTAL = re.compile(
    r"(?:^|[^a-z])(?:(?:num|total|max|warmup)[-_]?(?:epoch|step|iteration|iter)s?|"
    rf"n[-_]?(?:epochs|steps|iterations|iters)|accum[a-z]*[-_]?steps?|acc[-_]?steps){SEPARATOR}$",
    FLAGS,
)
EPOCH_AFTER = re.compile(r"[-_ ]?(?:epochs?|ep)(?![a-z0-9])", FLAGS)
STEP_AFTER = re.compile(r"[km]?[-_ ]?(?:steps?|iterations?|iters?|updates?)(?![a-z0-9])", FLAGS)
LETTER = re.compile(r"(?:^|[-_. ])([es])$", FLAGS)
THOUSANDS = {"k": 1_000, "m": 1_000_000}
THOUSAND = re.compile(r"([km])(?![a-z0-9])", FLAGS)
SAMPLES = re.compile(r"(?:^|[^a-z])(?:consumed|num|n)?_?(?:samples|tokens)=$", FLAGS)
"""Other counts of NeMo: ``consumed_samples=8000.0``."""

ORDINAL = re.compile(
    r"(?:^|(?:^|[^a-z])(?:models?|ckpt|checkpoints?|cp|epochs?|nets?|weights?|params?|snapshots?|snap|states?|iter|"
    rf"step|saved?|improvements?)){SEPARATOR}$",
    FLAGS,
)
"""Text before a bare number that counts saves; after ``digit`` or ``llama`` it distinguishes models."""

COUNTS_EPOCHS = re.compile(r"\.(?:keras|h5|hdf5)$|^(?:cp[-_.])?[0-9]+\.ckpt$", FLAGS)
"""Names in which a bare number is an epoch, the only count that Keras's ModelCheckpoint puts into names."""

KERAS_EPOCH = re.compile(
    r"e[0-9]{1,18}(?:[-_ ](?:-?[0-9]{1,18}\.[0-9]{1,18}|nan)){1,4}\.(?:keras|h5|hdf5|weights\.h5)", FLAGS
)
"""``e{epoch}-{val_loss:.4f}.keras``: if only measurements follow, ``e`` isn't an experiment."""

_MEASURED = r"(?:-?[0-9]{1,18}\.[0-9]{1,18}|nan)"
KERAS_TAIL = re.compile(
    r"(?P<word>[a-z])(?P<part>[1-9][0-9]{1,5}|(?<=[a-z]{4}v)[0-9]|(?<=[a-z]{4}[-_]v)[0-9])?"
    rf"\.(?P<epoch>[0-9]{{1,18}})-(?={_MEASURED}(?:-{_MEASURED}){{0,3}}$)",
    FLAGS,
)
"""``{any}.{epoch:02d}-{val_loss:.2f}``, as in ModelCheckpoint's documentation, where ``any`` may end like
``resnet50`` or ``mobilenet_v2``. Possible decimals, as in ``lr0.01-0.87``, don't match."""
KERAS_FILE = re.compile(r"\.(?:keras|h5|hdf5)$", FLAGS)

VALUE = re.compile(
    r"(?<=[0-9])(?:[-_ ]|__)(?P<value>-?(?:[0-9]+(?:\.[0-9]+|(?:\.[0-9]+)?e[-+][0-9]+)|nan))$", FLAGS
)
"""A value after the epoch at the end of a name, from ``{epoch:02d}-{val_loss:.2f}``."""

BEST = re.compile(r"(?:^|[^a-z])best(?![a-z])", FLAGS)
PAIR = re.compile(
    r"((?:ckpt|checkpoint|cp|snapshot)[-_]|(?:[^0-9].{0,200}?[^a-z])?epoch[-_=]?)"
    r"([0-9]{1,18})([-_])([0-9]{1,18})((?:\.[a-z][a-z0-9]{0,12}){0,2})",
    FLAGS,
)
"""Epoch and step, if several names confirm it: ``ckpt-5-3500.pt``, ``model_epoch5_3500.pth``."""
PLAIN_WORD = re.compile(
    rf"(?:^|[^a-z])(?:model|best|ckpt|checkpoint|weights|net|last|final|snapshot){SEPARATOR}$", FLAGS
)
# Words before a number that distinguishes checkpoints saved side by side, such as folds, ranks or settings.
# It is no position in a series: blanking it would put siblings into one series, from which retention removes.
SIBLING = re.compile(
    r"(?:^|[^a-z])(?:k?fold|cv|split|seed|rank|run|trial|exp|experiment|gpu|device|worker|node|host|job|task|"
    r"sub|subj|subject|patient|v|ver|version|rev|part|shard|expert|member|ensemble|head|heads|layer|layers|"
    r"stage|phase|level|size|bs|batch|batchsize|dim|hidden|width|depth|lr|wd|config|cfg|variant|group|class|"
    r"domain|client|agent|env|trainer|pserver|consolidated|random_states?|rng_states?|rng|custom_checkpoint|"
    r"dist_optim|pt|pth|bin|tp|pp|dp|mp|zero|fsdp|chunk|piece|slice|"
    rf"[fknrsx]){SEPARATOR}$",
    FLAGS,
)
STATES_AFTER = re.compile(r"[-_](?:model|optim)_states(?![a-z0-9])", FLAGS)
AFTER_NUMBER = re.compile(r"[0-9][-_. =]{1,2}$")
TOKEN_BEFORE = re.compile(r"(?:^|[^a-z0-9])[a-z]*$", FLAGS)
TRAINER = re.compile(r"checkpoint-([0-9]{1,18})", FLAGS)
STEP_DIRECTORY = re.compile(
    r"(?:(?:models?|weights|nets?|states?|saved?|snapshot|checkpoint|ckpt)[-_=.]?){0,2}"
    r"(?:(?:(?:global[-_]?)?(?:step|iter|iteration|epoch|update)|checkpoint|ckpt)[-_=.]?[0-9]{1,18}"
    r"(?:[-_.,](?!$)|$)){1,3}|ep[0-9]{1,18}-ba[0-9]{1,18}"
    r"|(?:.{1,200}[-_])?e[0-9]{3,18}[-_]s[0-9]{3,18}(?:[-_].{1,200})?",
    FLAGS,
)
"""Name of a directory for one save: a count, ``iter_0000100``, ``epoch_3-step_1200``, or epoch and step from
a template of ``rename``: ``exp1-e0003-s00001200-0.3412``. ``resnet_epoch_50`` could be one of several
trials."""

# Ours -----------------------------------------------------------------------------------------------

PINS = ".ckpttool-pins.toml"
PIN_LISTS = (PINS, ".ckpttool.toml")
"""Names of lists of pins; the second is no longer written, since it looks like that of a configuration."""

# Metrics --------------------------------------------------------------------------------------------

BITS = frozenset({"16", "32", "64"})
"""Values of ``precision`` that mean the type of numbers, not the metric."""

IN_WORD = re.compile(
    r"(?:(?<![a-z])|(?<=_))(?:(?:acc|top|m?ap)(?:50[-_]95|1|5|10|50|75)(?=[-_=: @]{1,2}[0-9])|"
    r"(?:top|at|m?ap|iou|bleu|rouge|recall|precision|hits?|ndcg|mrr)[-_@]?(?:[1-9][0-9]{0,2}|0\.[0-9]{1,2})"
    r"(?=[-_: @]{1,2}[0-9]+\.[0-9]))|"
    r"(?<![0-9.])[0-9]{1,6}(?:\.[0-9]{1,3})?[a-z]{0,3}(?==-?(?:[0-9]|nan|inf))",
    FLAGS,
)
"""A number in a metric's name: ``acc1_76.13``, ``BLEU-4=0.3``."""

NO_NUMBER = re.compile(r"=(nan|[-+]?inf)(?![a-z0-9])", FLAGS)
"""Lightning's text in a name for a metric that isn't finite."""

FRACTION = re.compile(
    r"_([0-9]{1,18})(?![a-z0-9]|\.[0-9]|[-_]of[-_]|"
    r"[-_ ]?(?:epochs?|ep|steps?|iterations?|iters?|updates?)(?![a-z0-9]|[-_= ][0-9]))",
    FLAGS,
)
"""Text after ``val_loss_0`` if ``_`` is the decimal point; in ``val_loss_1_25`` that is unclear."""
