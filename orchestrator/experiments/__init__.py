"""Experiments: arms × seeds whose shared prefix runs once (spec §2.4). `spec` → `tree` → `run` → `report`."""
