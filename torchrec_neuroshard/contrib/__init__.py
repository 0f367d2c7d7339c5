"""Adapters to other libraries around TorchRec, each loaded where it is asked for."""
