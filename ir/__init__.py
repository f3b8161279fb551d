"""What a job, a cluster and a plan are, and how they become an RPEG.

The RPEG (RLM Pipeline Execution Graph) is the one description of a step that the
model prices, the executor runs and the reader sees. This package imports nothing
else of the project.
"""
