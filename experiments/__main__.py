"""`python -m experiments` is `ropebridge`."""

from experiments.cli import main

main()
