"""What all verbs share: run folders, scenarios by name, console and progress."""
