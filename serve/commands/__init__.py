"""The subcommands of `duetto`, a file each; nobody but `cli` imports them."""
