"""The subcommands of `neuroshard`; `torchrec_neuroshard.cli` picks one."""
