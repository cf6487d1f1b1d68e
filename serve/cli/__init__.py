"""The command line: a file each subcommand, imported by `main` only."""
