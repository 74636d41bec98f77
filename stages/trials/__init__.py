"""Reads and never writes other people's trials: Harbor job folders, CTRF check reports, ATIF and chat transcripts."""
