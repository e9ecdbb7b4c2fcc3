"""The WAN test bed: a network namespace per device, and a relay that carries packets as the links would."""
