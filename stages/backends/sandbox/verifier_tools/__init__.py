"""Files of the verifier's read-only mount /opt/rsi; nothing here is imported by this project."""
