"""The `quire` command. Each subcommand is a module; nothing heavy is imported before it is used."""
