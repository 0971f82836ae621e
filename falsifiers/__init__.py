"""Falsifiers: each claim of a contract, attacked on the implementation with cases drawn from its domain."""
