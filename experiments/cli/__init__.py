"""The command `ropebridge`: its verbs and their options."""
