"""Operations: checkpoint in, frozen result out. They neither print nor exit nor read the command line.

To add one, write a module here, a command in ``cli/`` that calls it, and its page in ``docs/``. The parts of
``merge`` that a conversion doesn't need are in ``merging/``.

- Safety and integrity are two verdicts: a file can be intact and unsafe, or damaged and harmless. Findings in
  a pickle before its damage count for its safety.
- A check that a format can't support is skipped, with the reason. Skipped is not passed.
- Only compared content can be equal. Content that could not be compared, is undecided or can't be read is
  listed, and then ``equal`` is false.
- A conversion is planned before it is written: refusals, losses and conflicts with existing files are known
  without reading a value. Carrying it out reads each byte of the source once, and reads the target back to
  compare checksums.
"""
