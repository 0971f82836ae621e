"""The reference: every operation in float64 NumPy, forward and backward, slow and obviously correct."""
