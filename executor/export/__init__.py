"""Plans as configuration of the frameworks that people run. A file a framework; none of them is imported."""
