"""The program that made the corpus and the checkpoint of falsifiers/data: `python -m benchmarks.shipped_data.make`."""
