"""The WAN test bed: a network namespace for each device, and a relay that carries packets as the links would."""
