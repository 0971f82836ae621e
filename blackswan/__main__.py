"""`python -m blackswan`: the program `blackswan`."""

from blackswan.cli import main

if __name__ == "__main__":  # processes that are spawned import this module again
    main(prog_name="blackswan")
