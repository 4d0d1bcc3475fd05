"""`python -m framework`: hands over to the command line."""

from framework.cli import main

if __name__ == "__main__":
    main()
