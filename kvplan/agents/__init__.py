"""Agents: processes of one machine, or of several, that read and write each other's layouts."""
