"""migrations upgrades: numbered, frozen schema steps; imports none of the other packages."""
