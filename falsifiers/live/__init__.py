"""The live check of a training run: on some steps recorded values are held to the claims that attacks ask. A user starts `guard`."""
