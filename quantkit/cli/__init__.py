"""The command line: click commands without logic."""
