"""What people and ropebridge write: scenarios in YAML, plans and resolved scenarios in JSON."""
