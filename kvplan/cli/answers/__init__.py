"""Make the answers of commands: facts as plain data for JSON, and rows of words for tables and pages."""
