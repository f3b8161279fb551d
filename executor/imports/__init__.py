"""Configurations of frameworks read as (job, plan, devices)."""
