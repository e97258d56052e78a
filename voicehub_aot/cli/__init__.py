"""The command line: commands, their settings, and what they show."""
