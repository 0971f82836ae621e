"""`python -m blackswan`: the program `blackswan`."""

from blackswan.cli import main

main(prog_name="blackswan")
