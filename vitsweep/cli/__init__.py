"""What is typed: one file per verb, the table of verbs, completion, and the end of a command."""
