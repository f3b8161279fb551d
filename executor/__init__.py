"""Real runs of an RPEG on this machine: Ray for processes, torch for models."""
