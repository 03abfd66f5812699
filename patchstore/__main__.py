"""`python -m patchstore`: the command line."""

from patchstore.cli import main

main()
