"""What each verb of the command does, as plain functions."""
