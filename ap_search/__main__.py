"""Lets `python -m ap_search` do what the command `ap-search` does."""

import sys

from ap_search.cli import main

if __name__ == "__main__":
    sys.exit(main())
