"""What a plan must hold to be carried out, one concern a file; `planner.check.check.check_plan` asks them all."""
