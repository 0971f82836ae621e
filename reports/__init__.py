"""Verdict records in, pages out."""
