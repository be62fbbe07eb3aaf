"""``python -m ckpttool``."""

from ckpttool.cli import main

if __name__ == "__main__":
    main()
