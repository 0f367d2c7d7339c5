"""Cost models of kernels and collectives; inference only."""
