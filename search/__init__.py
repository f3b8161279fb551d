"""The search: which plan to run next, when a run is losing, and when to stop."""
