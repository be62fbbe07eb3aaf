"""Operations: checkpoint in, frozen result out. They neither print nor exit nor read the command line.

To add one, write a module here, a command in ``cli/`` that calls it, and its page in ``docs/``. What
``merge`` needs next to a conversion is in ``merging/``.

- Safety and integrity are two verdicts: a file can be intact and unsafe, or damaged and harmless. What was
  seen before a pickle broke off counts for its safety.
- A check that a format can't support is skipped, with the reason. Skipped is not passed.
- Equal is said of what was compared, and of nothing else. What could not be compared, is undecided or can't
  be read is listed, and then ``equal`` is false.
- A conversion is planned before it is written: all that can be known without reading a value is known then,
  what is refused, what is lost, what is in the way. Carrying it out reads each byte of the source once, and
  reads the target back to compare sums.
"""
