"""Reading models, clusters, software profiles, jobs and loads: the only readers of YAML and JSON."""
