"""`python -m patchstore`: the command line."""

from patchstore.cli.main import main

main()
