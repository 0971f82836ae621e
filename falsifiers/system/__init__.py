"""Claims about runs, files, data, devices and workers: one module a subject matter, one function a claim."""
