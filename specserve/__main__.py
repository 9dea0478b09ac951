"""`python -m specserve` is the command line. Knows nothing else."""

from specserve.cli.main import main

if __name__ == "__main__":
    main()
