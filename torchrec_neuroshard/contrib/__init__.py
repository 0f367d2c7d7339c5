"""Adapters to other libraries around TorchRec. Import the one you need."""
