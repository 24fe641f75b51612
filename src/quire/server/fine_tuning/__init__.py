"""/v1/fine_tuning: jobs that train adapters of the served model in processes of their own."""
