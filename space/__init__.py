"""The design space: axes of a plan, enumeration into arrays, and named presets."""
