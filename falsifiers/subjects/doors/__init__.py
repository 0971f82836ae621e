"""Questions to a subject about whole programs, and its answers, in plain Python objects and NumPy arrays.

`models` and `training` hold the protocols Model and Trainer. The other doors have no protocol of their own: their questions are the methods
of the classes in `subjects.impl`, whose arguments and answers are in `files`, `devices` and `commands`.
"""
