"""Measures of the falsifiers themselves and of speed; none of them is a claim."""
