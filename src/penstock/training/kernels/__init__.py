"""Kernels for operators that torch computes slowly when many small models are trained as one, each with a twin in
plain torch. They are used where they were measured to be faster, on a device that has Triton."""
