"""One small module per group of commands. Each imports what it runs inside the command, so that `--help` stays quick."""
