"""Forms: typed fields from configuration models, read back with every field's error beside the field."""
