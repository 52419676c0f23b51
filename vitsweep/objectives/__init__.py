"""What a model is trained for: one file and one YAML each."""
