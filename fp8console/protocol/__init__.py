"""What the processes say to each other: paths, records, events, commands, messages. Standard library only."""
