"""Bugs planted into the implementation as patches, in rounds, and a command that counts how many of them the falsifiers find."""
