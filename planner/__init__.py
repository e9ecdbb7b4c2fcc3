"""The words both backends speak: cluster, model profile, plan, schedules, strategies, policies, events."""
