"""Blame for a falsified claim: the first wrong call of the subject's trace, and the mutant that errs likewise."""
