"""Cost kernels: pure functions of numbers that broadcast over plans."""
