"""Operations: checkpoint in, frozen result out. They neither print nor exit nor read the command line.

To add one, write a module here, a command in ``cli/`` that calls it, and its page in ``docs/``.
"""
