"""Plans, tables of plans, rank meshes and stage layouts."""
