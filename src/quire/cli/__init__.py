"""The `quire` command. Each subcommand is a module, and nothing heavy is imported before it is
needed."""
