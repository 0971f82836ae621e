"""The training step written by hand for a GPU: packed tokens, one forward and backward pass a layer, captured in a CUDA graph.

It computes what `impl.classifier` and automatic differentiation compute, on the same parameters, and is held to the same claims.
"""
