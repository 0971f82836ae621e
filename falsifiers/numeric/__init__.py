"""Claims about arrays: cases drawn from a domain, the noise floor of honest arithmetic on each, and the comparison of two answers."""
