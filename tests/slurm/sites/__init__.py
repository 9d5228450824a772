"""What sites differ in: partitions, limits, containers (with a stand-in for Apptainer), accounts."""
