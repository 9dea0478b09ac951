"""`python -m specserve` is the command line."""

from specserve.cli.main import main

if __name__ == "__main__":
    main()
