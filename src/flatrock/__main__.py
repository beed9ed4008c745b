"""`python -m flatrock`."""

from flatrock.cli.main import main

main()
