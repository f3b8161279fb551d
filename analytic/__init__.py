"""The analytical model: what a step costs, computed from its RPEG on arrays of plans; no device is touched."""
