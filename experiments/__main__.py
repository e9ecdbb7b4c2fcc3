"""`python -m experiments` is `ropebridge`."""

from experiments.cli.app import main

main()
