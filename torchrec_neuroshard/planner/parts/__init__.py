"""What stands behind TorchRec's interfaces, and what these share."""
