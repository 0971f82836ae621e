"""Subjects: sets of implementations under test, operation → answer for NumPy inputs in a dtype on a device."""
