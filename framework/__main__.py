"""`python -m framework`: hands over to the command line."""

try:
    from framework.cli import main

    if __name__ == "__main__":
        main()
except KeyboardInterrupt:  # before the command line is there to take it
    raise SystemExit(130) from None
