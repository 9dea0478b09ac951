"""`python -m specserve` is the command line. Knows nothing else."""

from specserve.cli import main

if __name__ == "__main__":
    main()
