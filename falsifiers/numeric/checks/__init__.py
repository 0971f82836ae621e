"""What a claim about arrays compares where it is not plain parity: one function a check."""
