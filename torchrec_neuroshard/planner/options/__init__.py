"""What a table may be: TorchRec's options, the devices and the rules on them."""
